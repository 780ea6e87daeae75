"""lm-eval: log-likelihoods of `local-completions` are llama.cpp's own; `local-chat-completions` generates."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from tests.clients.servers import PYTHON, ROOT, Server

DOCUMENTS = (
    ("Hello! My name is", " Ada."),
    ("You have 7 boats. How many boats do you have?", " You have 7 boats."),
    ("Zürich is a city,", " and Ü is a letter."),
    ("The ship sailed over the", " sea and came home again, after many days on the water."),
)
TOLERANCE = 0.02
"""Of a token's log-probability: the server's flash attention adds in another order."""
CHOICES = """
task: names
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Hello! My name is {{{{name}}}}. What is my name? Your name is"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{choices.index(name)}}}}"
metric_list: [{{metric: acc}}]
"""
ANSWERS = """
task: replies
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: generate_until
doc_to_text: "Hello! My name is {{{{name}}}}."
doc_to_target: "{{{{name}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 48, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
NAMES = ("Ada", "Bob", "Mia")


def arguments(server: Server, path: str = "/v1/completions", **more: Any) -> str:
    fields = {"base_url": server.url + path, "model": "demo", "num_concurrent": 2, **more}
    return ",".join(f"{name}={value}" for name, value in fields.items())


@pytest.mark.parametrize("tokenized", [True, False])
def test_log_likelihoods_are_those_of_llama_cpp(server: Server, tokenized: bool) -> None:
    lm = get_model("local-completions").create_from_arg_string(arguments(server, tokenized_requests=tokenized))
    assert lm.tokenizer_backend == "remote", "the server has a tokenizer for it"
    requests = [Instance("loglikelihood", {}, document, i) for i, document in enumerate(DOCUMENTS)]
    found = lm.loglikelihood(requests)
    pairs = [lm._encode_pair(*document) for document in DOCUMENTS]
    command = [PYTHON, str(ROOT / "tests" / "clients" / "direct_scores.py")]
    sent = json.dumps([context + continuation for context, continuation in pairs])
    environ = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, input=sent, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for (score, _), (_, continuation), scores in zip(found, pairs, json.loads(done.stdout), strict=True):
        expected = sum(scores[-len(continuation) :])
        assert score == pytest.approx(expected, abs=TOLERANCE * len(continuation))


def evaluated(tmp_path: Path, task: str, text: str, model: str, args: str, **more: Any) -> Any:
    """The results and samples of a task on this machine's data."""
    data = tmp_path / "data.jsonl"
    rows = [{"name": name, "choices": list(NAMES)} for name in NAMES]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / f"{task}.yaml").write_text(text.format(data=data))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    return simple_evaluate(
        model=model, model_args=args, tasks=[task], task_manager=manager, bootstrap_iters=0, **more
    )


def test_a_task_of_choices(tmp_path: Path, server: Server) -> None:
    results = evaluated(tmp_path, "names", CHOICES, "local-completions", arguments(server))
    assert results["results"]["names"]["acc,none"] == 1.0
    assert len(results["samples"]["names"]) == len(NAMES)


def test_a_task_of_chats(tmp_path: Path, server: Server) -> None:
    args = arguments(server, "/v1/chat/completions")
    results = evaluated(tmp_path, "replies", ANSWERS, "local-chat-completions", args, apply_chat_template=True)
    replies = [sample["resps"][0][0] for sample in results["samples"]["replies"]]
    assert all(name in reply for name, reply in zip(NAMES, replies, strict=True)), replies
