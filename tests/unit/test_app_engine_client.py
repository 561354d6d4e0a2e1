"""The engine client against a fake engine process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from mira_app import engine_client
from mira_app.engine_client import EngineClient
from mira_engine import api

FAKE = Path(__file__).parents[1] / "fake_engine.py"
WAIT_S = 60
"""Only a failure takes so long."""


@pytest.fixture
def make_client(tmp_path):
    clients = []

    def make(*modes: str, **options) -> EngineClient:
        client = EngineClient([sys.executable, str(FAKE), *modes], log_dir=tmp_path, **options)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


def load(client: EngineClient):
    return client.submit(api.LoadModel(request_id=client.new_request_id(), model="fake"))


def generate(client: EngineClient):
    messages = (api.ChatMessage(role="user", content="hi"),)
    return client.submit(api.Generate(request_id=client.new_request_id(), messages=messages))


def test_calls_in_order_each_get_their_own_events(make_client):
    client = make_client()
    loading, first, second = load(client), generate(client), generate(client)
    assert isinstance(list(loading)[-1], api.ModelLoaded)
    for call in (first, second):
        events = list(call)
        assert {e.request_id for e in events} == {call.request_id}
        assert isinstance(events[-1], api.GenerationDone)
        streamed = "".join(e.text for e in events if isinstance(e, api.TokenDelta))
        assert streamed == events[-1].text


def test_notice_during_load_reaches_call_and_stays_in_force(make_client):
    client = make_client()
    events = list(load(client))
    assert [e.code for e in events if isinstance(e, api.Notice)] == ["budget-default"]
    assert [n.code for n in client.notices] == ["budget-default"]
    list(load(client))
    assert [n.code for n in client.notices] == ["budget-default"]


def test_cancel_ends_reply_with_partial_text(make_client):
    client = make_client("slow")
    call = generate(client)
    for event in call:
        if isinstance(event, api.TokenDelta):
            client.cancel(call)
            break
    last = list(call)[-1]
    assert last.reason is api.FinishReason.CANCELLED
    assert last.text.startswith("A cache ")


def test_request_failed_raises_its_error_after_partial_text(make_client):
    call = generate(make_client("fail-reply"))
    seen = []
    with pytest.raises(api.ContextLengthError) as caught:
        seen.extend(call)
    assert caught.value.hint == "Less."
    assert "".join(e.text for e in seen if isinstance(e, api.TokenDelta)) == "A cache keeps "


def test_engine_killed_mid_reply_fails_call_with_signal_and_log_tail(make_client):
    client = make_client("die-mid-reply")
    seen = []
    with pytest.raises(api.EngineProcessError, match=r"(?s)SIGKILL.*fake engine starts") as caught:
        seen.extend(generate(client))
    assert "What was finished is kept" in caught.value.hint
    assert "smaller budget" in caught.value.hint
    assert any(isinstance(e, api.TokenDelta) for e in seen)
    assert client.lost is not None
    assert not client.is_running
    with pytest.raises(api.EngineProcessError):
        list(generate(client))


def test_restart_after_death_answers_again(make_client, tmp_path):
    flag = tmp_path / "die"
    flag.touch()
    client = make_client(f"die-once={flag}")
    with pytest.raises(api.EngineProcessError):
        list(generate(client))
    first_pid = client.pid
    client.restart()
    assert client.lost is None
    assert isinstance(list(generate(client))[-1], api.GenerationDone)
    assert client.pid != first_pid


def test_exit_at_start_reports_code_and_last_lines(make_client):
    with pytest.raises(api.EngineProcessError, match=r"(?s)exit code 7.*boom: no such library"):
        list(load(make_client("die-at-start")))


def test_other_protocol_version_is_refused(make_client):
    client = make_client("wrong-version")
    with pytest.raises(api.EngineProcessError, match="protocol 999"):
        list(load(client))


def test_missing_heartbeat_kills_and_reports(make_client):
    client = make_client("hang", heartbeat_timeout_s=0.3)
    with pytest.raises(api.EngineProcessError, match="no sign of life"):
        list(load(client))
    assert client.lost is not None


def test_silent_start_is_reported(make_client):
    client = make_client("mute-start", start_timeout_s=0.3)
    with pytest.raises(api.EngineProcessError, match="did not start"):
        list(load(client))


def test_line_that_is_no_message_is_reported(make_client):
    client = make_client("garbage")
    with pytest.raises(api.EngineProcessError, match="cannot be read"):
        list(load(client))


def test_request_the_engine_cannot_read_ends_its_call(make_client):
    with pytest.raises(api.EngineProcessError, match="Unread"):
        list(load(make_client("unread")))


def test_command_that_does_not_exist_is_reported(tmp_path):
    client = EngineClient(["/nonexistent/engine"], log_dir=tmp_path)
    with pytest.raises(api.EngineProcessError, match="cannot be started"):
        client.start()


def test_log_dir_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").touch()
    client = EngineClient([sys.executable, str(FAKE)], log_dir=tmp_path / "file" / "logs")
    with pytest.raises(api.EngineProcessError, match="cannot be written"):
        client.start()


def test_close_while_replying_ends_process_and_call(make_client):
    client = make_client("slow")
    call = generate(client)
    for event in call:
        if isinstance(event, api.TokenDelta):
            break
    pid = client.pid
    client.close()
    assert call.is_done
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    client.close()


def test_close_kills_engine_that_does_not_answer(make_client):
    client = make_client("hang")
    call = load(client)
    assert client._process._is_ready.wait(WAIT_S)
    client.close(grace_s=0.1)
    with pytest.raises(api.EngineProcessError, match="shut down"):
        list(call)


def test_engine_killed_from_outside_while_idle_is_noticed(make_client):
    client = make_client()
    list(load(client))
    os.kill(client.pid, signal.SIGTERM)
    assert client._process._has_ended.wait(WAIT_S)
    assert "SIGTERM" in client.lost.message


def write_log(folder: Path, name: str, mtime: float, text: str = "x") -> Path:
    path = folder / f"engine-{name}.log"
    path.write_text(text)
    os.utime(path, (mtime, mtime))
    return path


def test_old_logs_are_removed_and_newest_kept(make_client, tmp_path):
    for number in range(9):
        write_log(tmp_path, f"x{number}", number)
    make_client().start()
    left = sorted(p.name for p in tmp_path.glob("engine-x*.log"))
    assert left == [f"engine-x{n}.log" for n in range(4, 9)]


def test_logs_of_living_apps_stay_and_empty_ones_of_dead_apps_go(make_client, tmp_path):
    living = write_log(tmp_path, str(os.getppid()), 0, text="")
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    empty = write_log(tmp_path, str(dead.pid), 1, text="")
    for number in range(9):
        write_log(tmp_path, f"x{number}", 10 + number)
    make_client().start()
    assert living.exists()
    assert not empty.exists()


@pytest.mark.parametrize("mode", ["die-mid-reply", "garbage"])
def test_log_that_is_gone_does_not_hide_that_the_engine_died(make_client, tmp_path, mode):
    client = make_client(mode)
    client.start()
    (tmp_path / f"engine-{os.getpid()}.log").unlink()
    with pytest.raises(api.EngineProcessError, match="SIGKILL|cannot be read"):
        list(generate(client))
    assert client._process._has_ended.is_set()


def test_silent_engine_is_killed_although_its_log_is_gone(make_client, tmp_path):
    client = make_client("hang", heartbeat_timeout_s=0.3)
    client.start()
    (tmp_path / f"engine-{os.getpid()}.log").unlink()
    with pytest.raises(api.EngineProcessError, match="no sign of life"):
        list(load(client))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_fault_of_the_reader_ends_every_call(make_client, monkeypatch):
    def fail(line):
        raise RecursionError

    monkeypatch.setattr(engine_client, "decode", fail)
    with pytest.raises(api.EngineProcessError, match="no longer be heard|exit code|killed by"):
        list(load(make_client()))


def test_notices_can_be_read_while_they_change(make_client):
    client = make_client()
    list(load(client))
    with client._process._lock:
        reader = threading.Thread(target=lambda: client.notices, daemon=True)
        reader.start()
        reader.join(timeout=0.2)
        assert reader.is_alive()
    reader.join(timeout=WAIT_S)
    assert not reader.is_alive()


def test_drain_joins_deltas_and_keeps_latest_sample():
    from mira_app.engine_call import EngineCall

    call = EngineCall("r1")
    for text in "abc":
        call.deliver(api.TokenDelta(request_id="r1", text=text, num_tokens=1))
    for number in (1, 2):
        stats = api.ReplyStats(num_new_tokens=number)
        call.deliver(api.StatsSample(request_id="r1", stats=stats))
    delta, sample = call.drain()
    assert (delta.text, delta.num_tokens) == ("abc", 3)
    assert sample.stats.num_new_tokens == 2
    assert call.drain() == []
