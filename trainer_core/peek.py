"""A look at the inputs of a spec while somebody fills in the form: python -m trainer_core.peek < request.json

The request is {"spec": {...}, "datasets": ["data", "evaluation"], "agent": "all"}: which datasets to look into, and which
tools and environments to load: all, those that are built in (what else there is depends on the host), or none. The answer, one
line of JSON on standard output, has `problems` (each with `field` and `message`), `unread` (sentences about what could not be
looked at) and `datasets`: for each its `columns` as they are stored, and the first `rows` with the names of the run. A program
of its own, so that the web process imports no dataset library and can give up.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from trainer_core.explain import sentence
from trainer_core.inputs import BadInput, about, check_rewards, load_agent
from trainer_core.spec import RunSpec

ROWS = 3
Agent = Literal["all", "builtin", "none"]


def peek(spec: RunSpec, names: list[str], agent: Agent) -> dict[str, Any]:
    """The answer to a request."""
    answer: dict[str, Any] = {"problems": [], "unread": [], "datasets": {}}
    for name in names:
        try:
            answer["datasets"][name] = _look(spec, name)
        except BadInput as error:
            answer["problems"].append({"field": error.field, "message": sentence(error)})
        except Exception as error:  # noqa: BLE001  whatever keeps the rows from being read is no fault of the spec
            answer["unread"].append(sentence(error))
    if agent != "none":
        try:
            load_agent(spec if agent == "all" else _built_in(spec))
        except BadInput as error:
            answer["problems"].append({"field": error.field, "message": sentence(error)})
    return answer


def _built_in(spec: RunSpec) -> RunSpec:
    """The spec without the tools and the environment that do not come with Offbeat."""
    from trainer_core.rollout.registry import BUILTINS

    tools = [name for name in spec.agent.tools if name in BUILTINS["tool"]]
    known = spec.agent.environment in BUILTINS["environment"]
    environment = {} if known else {"environment": "", "environment_options": {}}
    return spec.model_copy(update={"agent": spec.agent.model_copy(update={"tools": tools, **environment})})


def _look(spec: RunSpec, name: str) -> dict[str, Any]:
    """Raises BadInput, and whatever keeps the dataset from being read."""
    from trainer_core.rollout.datasets import NotReached, first_rows

    data = spec.data if name == "data" else spec.evaluation_data()
    if data is None:
        raise ValueError("nothing is evaluated, so there is no dataset for it")
    with about(name):
        try:
            columns, rows = first_rows(data, ROWS)
        except NotReached as error:
            raise RuntimeError(str(error)) from error
    check_rewards(spec, name, list(rows[0]))
    return {"columns": columns, "rows": rows}


def main() -> int:
    request = json.load(sys.stdin)
    answer = peek(RunSpec.model_validate(request["spec"]), request["datasets"], request["agent"])
    print(json.dumps(answer, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
