"""How a command gets its model ready while another process is at it."""

from __future__ import annotations

import io

import pytest
from app_fakes import FakeCatalog, FakeEngineClient
from mira_app.answer import BUSY_RETRY_MAX_S, BUSY_RETRY_S, Answerer
from mira_app.engine_call import EngineCall
from mira_app.progress import LineProgress
from mira_app.settings import Settings
from mira_engine import api

BUSY = api.ModelBusyError("It is being prepared by another process.", hint="Wait for it.")


class BusyEngineClient(FakeEngineClient):
    """Another process holds the model at the first `num_busy` requests."""

    def __init__(self, num_busy: int, error: api.MiraError = BUSY) -> None:
        super().__init__()
        self.num_busy, self.error = num_busy, error

    def submit(self, request) -> EngineCall:
        call = super().submit(request)
        if len(self.calls) <= self.num_busy:
            call.deliver(api.RequestFailed(request_id=call.request_id, **self.error.to_fields()))
        else:
            call.deliver(
                api.PrepareDone(
                    request_id=call.request_id, model="builtin", precision=api.Precision.NESTED
                )
            )
        return call


def make_answerer(client: FakeEngineClient, slept: list[float]) -> tuple[Answerer, io.StringIO]:
    err = io.StringIO()
    answerer = Answerer(
        client, FakeCatalog(is_ready=False), Settings(), err=err, make_progress=LineProgress,
        sleep=slept.append,
    )  # fmt: skip
    return answerer, err


def test_model_that_another_process_prepares_is_waited_for_and_told_once():
    client, slept = BusyEngineClient(num_busy=6), []
    answerer, err = make_answerer(client, slept)
    answerer.prepare()
    assert slept == [BUSY_RETRY_S, 2, 4, 8, BUSY_RETRY_MAX_S, BUSY_RETRY_MAX_S]
    assert len({request.request_id for request in client.requests}) == 7
    assert err.getvalue() == (
        "note: It is being prepared by another process. Waiting for it; Ctrl+C ends that.\n"
    )


def test_preparation_that_fails_otherwise_is_not_tried_again():
    client, slept = BusyEngineClient(num_busy=1, error=api.PrepareError("The disk broke.")), []
    answerer, _ = make_answerer(client, slept)
    with pytest.raises(api.PrepareError, match="broke"):
        answerer.prepare()
    assert slept == []


def test_wait_for_another_process_is_ended_by_an_interrupt():
    client = BusyEngineClient(num_busy=1)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    answerer, _ = make_answerer(client, [])
    answerer._sleep = interrupt
    with pytest.raises(KeyboardInterrupt) as caught:
        answerer.prepare()
    assert len(client.requests) == 1
    assert caught.value.__context__ is None, "it would be taken for a second interrupt"
