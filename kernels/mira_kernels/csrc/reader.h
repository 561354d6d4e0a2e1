// What the readers are made of: files, an emulated link, records on their way and queues of them.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mira {
namespace {

using Clock = std::chrono::steady_clock;

enum Failure : int32_t { kNone = 0, kCannotOpen = 1, kCannotRead = 2, kEndsBefore = 3 };

// Part of a record, as the caller lays it out.
struct Span {
  int64_t file, offset, num_bytes;
};

// What became of a record, as the caller reads it. `file`, `code` (an errno) and `stop_byte`
// belong to a failure.
struct Landed {
  int64_t key, slot;
  double seconds;
  int32_t failure, code;
  int64_t file, stop_byte;
};

// A file that is opened when it is first read. Where O_DIRECT is refused it goes without.
class File {
 public:
  File(std::string path, bool wants_direct)
      : path_(std::move(path)), wants_direct_(wants_direct) {}
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  File(const File&) = delete;

  // Returns the descriptor, or -1 with errno set.
  int open(std::atomic<int32_t>& is_any_buffered) {
    std::lock_guard<std::mutex> hold(mutex_);
    if (fd_ >= 0) return fd_;
#ifdef O_DIRECT
    if (wants_direct_) fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
#endif
    if (fd_ < 0) {
      do fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
      while (fd_ < 0 && errno == EINTR);
      if (fd_ >= 0) is_any_buffered = 1;
    }
    return fd_;
  }

 private:
  const std::string path_;
  const bool wants_direct_;
  std::mutex mutex_;
  int fd_ = -1;
};

// Holds the link to a rate and adds latency to each record. Records pass one after another.
class Throttle {
 public:
  Throttle(double bytes_per_s, double latency_s)
      : bytes_per_s_(bytes_per_s), latency_s_(latency_s), free_at_(Clock::now()) {}

  void set_rate(double bytes_per_s) {
    std::lock_guard<std::mutex> hold(mutex_);
    bytes_per_s_ = bytes_per_s;
  }

  // Returns once so many bytes, begun at `started`, would have landed.
  void hold(int64_t num_bytes, Clock::time_point started, bool is_end) {
    Clock::time_point ready_at;
    {
      std::lock_guard<std::mutex> hold(mutex_);
      free_at_ = std::max(free_at_, started);
      if (bytes_per_s_ > 0) free_at_ += span_of(double(num_bytes) / bytes_per_s_);
      ready_at = free_at_ + span_of(is_end ? latency_s_ : 0.0);
    }
    if (ready_at > Clock::now()) std::this_thread::sleep_until(ready_at);
  }

 private:
  static Clock::duration span_of(double seconds) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }

  std::mutex mutex_;
  double bytes_per_s_;  // 0 for no limit.
  const double latency_s_;
  Clock::time_point free_at_;
};

// Part of a record: where it is and where it goes.
struct Part {
  File* file;
  int64_t file_index, offset, num_bytes;
  char* to;
};

// One record on its way into a slot.
struct Move {
  Landed result{};
  std::vector<Part> parts;
  int64_t record_bytes = 0;
  int64_t num_done = 0;                // Bytes that are there, parts in order.
  std::atomic<bool> is_urgent{false};  // Whether somebody waits for it.
};

using MovePtr = std::shared_ptr<Move>;

// Moves in the order in which they are served, found by key.
class Queue {
 public:
  bool empty() const { return moves_.empty(); }

  // A key that is queued keeps its place.
  void push_back(MovePtr move) {
    const auto found = places_.find(move->result.key);
    if (found != places_.end()) {
      *found->second = std::move(move);
      return;
    }
    const int64_t key = move->result.key;
    places_[key] = moves_.insert(moves_.end(), std::move(move));
  }

  void push_front(MovePtr move) {
    const int64_t key = move->result.key;
    take(key);
    places_[key] = moves_.insert(moves_.begin(), std::move(move));
  }

  MovePtr pop_front() { return take(moves_.front()->result.key); }

  // Removes a key's move and returns it, or null.
  MovePtr take(int64_t key) {
    const auto found = places_.find(key);
    if (found == places_.end()) return nullptr;
    MovePtr move = std::move(*found->second);
    moves_.erase(found->second);
    places_.erase(found);
    return move;
  }

  void clear() {
    moves_.clear();
    places_.clear();
  }

 private:
  std::list<MovePtr> moves_;
  std::unordered_map<int64_t, std::list<MovePtr>::iterator> places_;
};

}  // namespace
}  // namespace mira
