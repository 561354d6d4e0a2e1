// Threads that read records from files into memory, with an interface that ctypes calls.
// Knows files, lengths and addresses; of experts only a key. Needs POSIX alone.
//
// Demands come before prefetches. A prefetch is read in pieces and gives way between two of
// them while a demand is queued or under way. All queues hang on one mutex, which no thread
// holds while it reads, sleeps or calls back: whoever holds the interpreter's lock may wait
// for it.

#include <pthread.h>
#include <signal.h>

#include <condition_variable>
#include <deque>
#include <exception>

#include "reader.h"

namespace mira {
namespace {

constexpr double kPieceSeconds = 0.75e-3;  // About as long as a demand waits for a prefetch.
constexpr int64_t kMinPieceBytes = 128 << 10;
constexpr int64_t kPageBytes = 4096;

// Called with each piece read, in the reader's thread.
using OnPiece = void (*)(int64_t num_bytes, int32_t is_end);

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Pool {
 public:
  Pool(double bytes_per_s, double latency_s, OnPiece on_piece)
      : throttle_(bytes_per_s, latency_s),
        is_throttled_(bytes_per_s > 0 || latency_s > 0),
        on_piece_(on_piece) {}

  int64_t add_file(const char* path, bool wants_direct) {
    std::lock_guard<std::mutex> hold(mutex_);
    files_.push_back(std::make_unique<File>(path, wants_direct));
    return int64_t(files_.size()) - 1;
  }

  void submit(int64_t key, int64_t slot, const Span* spans, const uint64_t* to, int64_t count,
              bool is_demand) {
    auto move = std::make_shared<Move>();
    move->result.key = key;
    move->result.slot = slot;
    move->is_urgent = is_demand;
    move->parts.reserve(size_t(count));
    {
      std::lock_guard<std::mutex> hold(mutex_);
      if (is_closed_) return;
      for (int64_t i = 0; i < count; ++i) {
        File* file = files_[size_t(spans[i].file)].get();
        move->parts.push_back({file, spans[i].file, spans[i].offset, spans[i].num_bytes,
                               reinterpret_cast<char*>(to[i])});
        move->record_bytes += spans[i].num_bytes;
      }
      (is_demand ? demand_ : ahead_).push_back(std::move(move));
    }
    may_work_.notify_one();  // The mutex is free: who wakes up does not wait for it.
  }

  void promote(int64_t key) {
    std::unique_lock<std::mutex> hold(mutex_);
    if (MovePtr move = ahead_.take(key)) {
      move->is_urgent = true;
      demand_.push_back(std::move(move));
      hold.unlock();
      may_work_.notify_one();
      return;
    }
    const auto found = under_way_.find(key);
    if (found == under_way_.end() || found->second->is_urgent) return;
    found->second->is_urgent = true;
    ++num_urgent_;
  }

  // Takes what has landed, waiting for the first of it if a time is given.
  int64_t take(Landed* out, int64_t max, double timeout_s) {
    std::unique_lock<std::mutex> hold(mutex_);
    if (timeout_s > 0)
      has_landed_.wait_for(hold, std::chrono::duration<double>(timeout_s),
                           [this] { return !landed_.empty(); });
    int64_t count = 0;
    for (; count < max && !landed_.empty(); ++count) {
      out[count] = landed_.front();
      landed_.pop_front();
    }
    num_landed = int64_t(landed_.size());
    return count;
  }

  void set_rate(double bytes_per_s) {
    throttle_.set_rate(bytes_per_s);
    if (bytes_per_s > 0) is_throttled_ = true;
  }

  // A reader's life: until the pool is closed.
  void serve() {
    std::unique_lock<std::mutex> hold(mutex_);
    while (true) {
      may_work_.wait(hold, [this] { return is_closed_ || may_begin(); });
      if (is_closed_) break;
      const MovePtr move = (demand_.empty() ? ahead_ : demand_).pop_front();
      under_way_[move->result.key] = move;
      num_urgent_ += move->is_urgent;
      hold.unlock();
      const bool is_over = read(*move);
      hold.lock();
      under_way_.erase(move->result.key);
      num_urgent_ -= move->is_urgent;
      if (is_over) {
        landed_.push_back(move->result);
        num_landed = int64_t(landed_.size());
        has_landed_.notify_one();
      } else if (!is_closed_) {  // It gave way to a demand, and is the first to go on.
        (move->is_urgent ? demand_ : ahead_).push_front(move);
      }
      if (!demand_.empty() || !ahead_.empty()) may_work_.notify_one();
    }
    --num_running_;
    has_ended_.notify_all();
  }

  void add_running() {
    std::lock_guard<std::mutex> hold(mutex_);
    ++num_running_;
  }

  // Drops what is queued, waits for what is under way and closes the files, unless a reader
  // hangs. Returns whether all have ended.
  bool close(double timeout_s) {
    std::unique_lock<std::mutex> hold(mutex_);
    is_closed_ = true;
    demand_.clear();
    ahead_.clear();
    may_work_.notify_all();
    const bool are_all_ended =
        has_ended_.wait_for(hold, std::chrono::duration<double>(timeout_s),
                            [this] { return num_running_ == 0; });
    if (are_all_ended) files_.clear();
    return are_all_ended;
  }

  std::atomic<int64_t> num_landed{0};
  std::atomic<int32_t> is_any_buffered{0};

 private:
  bool may_begin() const { return !demand_.empty() || (!ahead_.empty() && num_urgent_ == 0); }

  // Reads what is missing of a move. Returns whether that is over, well or not.
  bool read(Move& move) {
    int64_t begin = 0;
    for (const Part& part : move.parts) {
      while (move.num_done < begin + part.num_bytes) {
        const int64_t done = move.num_done - begin, left = part.num_bytes - done;
        const int64_t size = move.is_urgent ? left : piece_bytes(left);
        const auto started = Clock::now();
        if (!read_piece(move.result, part, done, size)) return true;
        move.num_done += size;
        const bool is_end = move.num_done >= move.record_bytes;
        if (on_piece_ != nullptr) on_piece_(size, is_end);
        if (is_throttled_) throttle_.hold(size, started, is_end);
        const double elapsed = seconds_since(started);
        move.result.seconds += elapsed;
        note_rate(size, elapsed);
        if (!is_end && must_give_way(move)) return false;
      }
      begin += part.num_bytes;
    }
    return true;
  }

  bool read_piece(Landed& result, const Part& part, int64_t done, int64_t size) {
    const int64_t stop = done + size;
    const auto fail = [&](Failure failure) {
      result.failure = failure;
      result.code = errno;
      result.file = part.file_index;
      result.stop_byte = part.offset + stop;
      return false;
    };
    const int fd = part.file->open(is_any_buffered);
    if (fd < 0) return fail(kCannotOpen);
    while (done < stop) {
      const ssize_t got = ::pread(fd, part.to + done, size_t(stop - done), part.offset + done);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return fail(kCannotRead);
      if (got == 0) return fail(kEndsBefore);
      done += got;
    }
    return true;
  }

  bool must_give_way(const Move& move) {
    if (move.is_urgent) return false;
    std::lock_guard<std::mutex> hold(mutex_);
    return !move.is_urgent && (!demand_.empty() || num_urgent_ > 0);
  }

  // How much of a prefetch is read before it looks whether it is in the way.
  int64_t piece_bytes(int64_t num_left) const {
    const int64_t pages = int64_t(bytes_per_s_ * kPieceSeconds) / kPageBytes;
    const int64_t size = std::max(pages * kPageBytes, kMinPieceBytes);
    return num_left < 2 * size ? num_left : size;
  }

  void note_rate(int64_t num_bytes, double seconds) {
    const double rate = double(num_bytes) / std::max(seconds, 1e-6), before = bytes_per_s_;
    bytes_per_s_ = before > 0 ? before + 0.2 * (rate - before) : rate;
  }

  std::mutex mutex_;
  std::condition_variable may_work_, has_landed_, has_ended_;
  Queue demand_, ahead_;
  std::unordered_map<int64_t, MovePtr> under_way_;
  std::deque<Landed> landed_;
  std::vector<std::unique_ptr<File>> files_;
  int64_t num_urgent_ = 0;  // Of those under way, what somebody waits for.
  int64_t num_running_ = 0;
  bool is_closed_ = false;
  Throttle throttle_;
  std::atomic<bool> is_throttled_;
  std::atomic<double> bytes_per_s_{0};  // As measured lately.
  const OnPiece on_piece_;
};

// A pool and its threads. A thread that hangs in a read keeps the pool alive.
class Reader {
 public:
  Reader(int64_t num_threads, std::shared_ptr<Pool> made) : pool(std::move(made)) {
    sigset_t all, before;  // Signals are for the interpreter's threads.
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (int64_t i = 0; i < num_threads; ++i) {
        threads_.emplace_back([kept = pool] { kept->serve(); });
        pool->add_running();
#ifdef __linux__
        const std::string name = "mira-reader-" + std::to_string(i);
        pthread_setname_np(threads_.back().native_handle(), name.substr(0, 15).c_str());
#endif
      }
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      close(0);
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~Reader() { close(0); }

  bool close(double timeout_s) {
    if (threads_.empty()) return are_all_ended_;
    are_all_ended_ = pool->close(timeout_s);
    for (std::thread& thread : threads_) are_all_ended_ ? thread.join() : thread.detach();
    threads_.clear();
    return are_all_ended_;
  }

  const std::shared_ptr<Pool> pool;

 private:
  std::vector<std::thread> threads_;
  bool are_all_ended_ = true;
};

}  // namespace
}  // namespace mira

using mira::Reader;

extern "C" {

// Returns null where no threads can be had.
Reader* mira_reader_create(int64_t num_threads, double bytes_per_s, double latency_s,
                           mira::OnPiece on_piece) try {
  return new Reader(num_threads, std::make_shared<mira::Pool>(bytes_per_s, latency_s, on_piece));
} catch (const std::exception&) {
  return nullptr;
}

int64_t mira_reader_add_file(Reader* reader, const char* path, int32_t wants_direct) {
  return reader->pool->add_file(path, wants_direct != 0);
}

// Queues a record: `count` spans of files that were added, to as many addresses.
void mira_reader_submit(Reader* reader, int64_t key, int64_t slot, const mira::Span* spans,
                        const uint64_t* to, int64_t count, int32_t is_demand) {
  reader->pool->submit(key, slot, spans, to, count, is_demand != 0);
}

// Makes a prefetch a demand, whether it is queued, set aside or under way.
void mira_reader_promote(Reader* reader, int64_t key) { reader->pool->promote(key); }

// Takes at most `max` that have landed; waits for the first if `timeout_s` is above 0.
int64_t mira_reader_take(Reader* reader, mira::Landed* out, int64_t max, double timeout_s) {
  return reader->pool->take(out, max, timeout_s);
}

// Changes the emulated link's rate; 0 for no limit.
void mira_reader_set_rate(Reader* reader, double bytes_per_s) {
  reader->pool->set_rate(bytes_per_s);
}

// Where the number lies of what has landed and was not taken: read it before a call.
const void* mira_reader_num_landed(Reader* reader) { return &reader->pool->num_landed; }

// Whether a file had to be opened without O_DIRECT.
int32_t mira_reader_is_any_buffered(Reader* reader) { return reader->pool->is_any_buffered; }

// Drops what is queued and waits for what is under way. Returns whether all readers ended: if
// not, their memory has to stay. What has landed can still be taken.
int32_t mira_reader_close(Reader* reader, double timeout_s) { return reader->close(timeout_s); }

void mira_reader_free(Reader* reader) { delete reader; }

}  // extern "C"
