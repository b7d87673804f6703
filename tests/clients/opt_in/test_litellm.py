from __future__ import annotations

import json
from pathlib import Path

from tests.clients.edges import MODEL, HttpEdge
from tests.clients.opt_in.conftest import Programs

SCRIPT = Path(__file__).with_name("calls_by_litellm.py")
# Its list of prices is otherwise fetched.
LOCAL = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def test_litellm_is_served_as_by_openai(edge: HttpEdge, programs: Programs) -> None:
    output = programs.run("python", str(SCRIPT), edge.base_url, MODEL, env=LOCAL)

    answer = json.loads(output.splitlines()[-1])
    assert answer["text"]
    assert answer["streamed"] == answer["text"]
    assert answer["at_once"] == [answer["text"]]
    assert answer["finish_reason"] == "length"
    assert answer["usage"][1] == 12
    assert answer["streamed_usage"] == answer["usage"]
    assert answer["completion"]
    assert answer["bad_field"] == "BadRequestError"
    assert answer["other_model"] == "NotFoundError"
    assert answer["too_long"] == "ContextWindowExceededError"
    edge.wait_until_idle()
