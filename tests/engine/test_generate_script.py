"""``scripts/generate.py``: its records are what ``generate`` makes, its flags arrive, its errors name the input."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from dspark_jax.config import Sampling
from dspark_jax.generate import GenerateOutput
from dspark_jax.testing import tiny_target


@pytest.fixture(scope="module")
def script() -> Any:
    path = Path(__file__).resolve().parents[2] / "scripts" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate_script", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stand_in(calls: list[dict[str, Any]]) -> Any:
    """In place of ``generate``: counts upwards from the prompt's length to a stop token; compiles in no time."""

    def generate(target: Any, drafter: Any, prompts: Any, lengths: Any, *, seeds: Any, **options: Any) -> Any:
        calls.append({"width": prompts.shape[1], "drafter": drafter is not None, **options})
        count = options["max_new_tokens"]
        return GenerateOutput(
            tokens=(lengths[:, None] + jnp.arange(count)[None, :]).at[:, -1].set(-1),
            lengths=jnp.full(1, count - 1) + 0 * seeds.astype(jnp.int32),
            committed=jnp.zeros((1, count - 1), jnp.int32).at[:, 0].set(count - 2),
            offered=jnp.full((1, count - 1), 2),
            accepted=jnp.zeros((1, count - 1), jnp.int32),
        )

    return generate


class Tokenizer:
    """Characters; the chat template shows its messages."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        assert options == {"add_generation_prompt": True, "return_dict": False}
        return self("".join(f"<{m['role']}>{m['content']}" for m in messages))["input_ids"]


def shown(script: Any, *argv: str) -> list[tuple[str, bool]]:
    args = script.arguments(["--model", "m", *argv])
    return [("".join(map(chr, ids)), is_text) for ids, is_text in script.prompts(args, Tokenizer())]


def test_a_record_is_what_generate_makes(script: Any, monkeypatch: Any, capsys: Any) -> None:
    """Prompts are padded, compiled once for a length, cut to what was kept; the flags arrive."""
    calls: list[dict[str, Any]] = []
    target = tiny_target(num_layers=1, max_positions=20)
    monkeypatch.setattr(script, "generate", stand_in(calls))
    monkeypatch.setattr(script, "load_target", lambda path, dtype: target)
    monkeypatch.setattr(script, "check_drafter", lambda path: None)
    monkeypatch.setattr(script, "load_drafter", lambda path, target, dtype: jnp.zeros(1))
    common = ["--model", "m", "--prompt-ids", "3 1,4", "--max-new-tokens", "9", "--temperature", "0.7", "--seed", "5"]
    draft = ["--drafter", "d", "--confidence-threshold", "0.5", "--stop-token-ids", "10"]
    assert script.main([*common, *draft, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record.pop("seconds") > 0
    assert record == {"output_ids": [3, 4, 5, 6, 7, 8, 9, 10], "text": None, "committed": [7], "offered": [2]}
    assert calls.pop() == {
        "width": 64,
        "drafter": True,
        "max_new_tokens": 9,
        "sampling": Sampling(0.7),
        "verification": "rejection",
        "num_speculative_tokens": None,
        "stop_token_ids": (10,),
        "admit": "threshold",
        "confidence_threshold": 0.5,
    }
    plain = ["--drafter", "d", "--method", "none", "--confidence-threshold", "0.5", "--max-new-tokens", "999"]
    assert script.main([*common, *plain, "--stop-token-ids", "2 18", "--verification", "coupled"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("[3, 4") and "16 tokens in" in printed.err
    assert not calls[0]["drafter"] and "admit" not in calls[0] and calls[0]["max_new_tokens"] == 17
    assert calls[0]["stop_token_ids"] == (2, 18) and calls[0]["verification"] == "coupled"


def test_a_row_that_ends_without_a_reason_is_an_error(script: Any, monkeypatch: Any, capsys: Any) -> None:
    """Fewer tokens than asked for and no stop token: ``generate`` met logits that are not finite."""
    monkeypatch.setattr(script, "generate", stand_in([]))
    monkeypatch.setattr(script, "load_target", lambda path, dtype: tiny_target(num_layers=1))
    assert script.main(["--model", "m", "--prompt-ids", "3 1", "--max-new-tokens", "9"]) == 2
    assert "m: NaN or infinite logits after 8 tokens" in capsys.readouterr().err


def test_bad_input_is_refused_by_name(script: Any, monkeypatch: Any, capsys: Any) -> None:
    target = tiny_target(num_layers=1)
    monkeypatch.setattr(script, "load_target", lambda path, dtype: target)
    for argv, message in (
        (["--prompt-ids", "99"], "prompt_ids holds token id 99"),
        (["--prompt-ids", ""], "prompt_ids is empty"),
        (["--prompt-ids", "1", "--temperature", "-1"], "temperature"),
        (["--prompt", "text"], "has no tokenizer"),
        (["--prompt-ids", "1", "--num-speculative-tokens", "2"], "--num-speculative-tokens is about drafts"),
        (["--prompt-ids", "1", "--confidence-threshold", "0.5"], "--confidence-threshold is about drafts"),
    ):
        assert script.main(["--model", "m", *argv]) == 2
        assert message in capsys.readouterr().err


def test_text_is_plain_unless_a_chat_is_asked_for(script: Any, tmp_path: Path) -> None:
    assert shown(script, "--prompt", "hi") == [("hi", True)]
    assert shown(script, "--prompt", "hi", "--chat") == [("<user>hi", True)]
    assert shown(script, "--prompt-ids", "104 105") == [("hi", False)]
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "a"}, {"turns": ["b", "c"]}, {"messages": [{"role": "system", "content": "d"}]}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    assert shown(script, "--prompts", str(file)) == [("a", True), ("b", True), ("<system>d", True)]
    for line, message in (
        ('{"text": 1}', r"prompts.jsonl:1: an object with prompt, turns or messages"),
        ("{", r"prompts.jsonl:1: not valid JSON"),
        ('{"prompt": "a"}\n{"prompt": 5}', r"prompts.jsonl:2: prompt must be a string, found 5"),
        ('{"turns": "ab"}', r"turns must be a list of strings"),
        ('{"messages": [{"role": "user"}]}', r"messages must be a list of \{role, content\} strings"),
        ("\n \n", r"prompts.jsonl: no prompts in it"),
    ):
        file.write_text(line + "\n", encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            shown(script, "--prompts", str(file))
    file.write_bytes(b"\xff\xfe")
    for path in (file, tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match=f"--prompts {path}: "):
            shown(script, "--prompts", str(path))
