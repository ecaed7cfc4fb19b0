"""Outputs: statistics of requests that gave nothing, and the JSON entry."""

import json

import pytest

from pwjax.engine.outputs import RequestOutput, StreamEvent


def test_an_empty_output_has_sane_statistics():
    output = RequestOutput(request_id=0, prompt_tokens=3, token_ids=(), text="", finish_reason="stop")
    assert output.tokens_per_second == 0.0
    assert output.first_token_s is None


def test_json_entry():
    output = RequestOutput(
        request_id="a", prompt_tokens=3, token_ids=(5, 6), text="hi", finish_reason="length", seconds=0.5
    )
    fields = json.loads(json.dumps(output.to_json()))
    assert {"text": "hi", "token_ids": [5, 6], "finish_reason": "length", "prompt_tokens": 3}.items() <= fields.items()
    assert output.tokens_per_second == pytest.approx(4)


def test_events_end_with_the_output():
    output = RequestOutput(request_id=1, prompt_tokens=1, token_ids=(5,), text="hi", finish_reason="abort")
    event = StreamEvent(request_id=1, text="hi", token_ids=(5,), finish_reason="abort", output=output)
    assert event.output is output
    assert StreamEvent(request_id=1, text="").finish_reason is None
