"""Cases of the reference's layout with random weights and other shapes, and what the NumPy model expects of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.checkpoint import save
from tests.parity.reference import Drafter, Target, softmax

Arrays = dict[str, np.ndarray]

TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
DRAFT: dict[str, Any] = {
    **TARGET,
    "architectures": ["Qwen3DSparkModel"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "tie_word_embeddings": False,
    "num_target_layers": 4,
    "block_size": 5,
    "mask_token_id": 38,
    "target_layer_ids": [0, 2],
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
NEW_TOKENS = 18


def layer_weights(rng: np.random.Generator, prefix: str, c: dict[str, Any]) -> Arrays:
    d, ff, size = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * size, c["num_key_value_heads"] * size
    shapes = {
        "self_attn.q_proj": (q, d),
        "self_attn.k_proj": (kv, d),
        "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, q),
        "mlp.gate_proj": (ff, d),
        "mlp.up_proj": (ff, d),
        "mlp.down_proj": (d, ff),
    }
    norms = {"input_layernorm": d, "post_attention_layernorm": d, "self_attn.q_norm": size, "self_attn.k_norm": size}
    out = {f"{prefix}{n}.weight": rng.normal(size=s) / np.sqrt(s[1]) for n, s in shapes.items()}
    return out | {f"{prefix}{n}.weight": 1.0 + 0.2 * rng.normal(size=s) for n, s in norms.items()}


def target_weights(rng: np.random.Generator, c: dict[str, Any]) -> Arrays:
    d, v = c["hidden_size"], c["vocab_size"]
    out = {"model.embed_tokens.weight": rng.normal(size=(v, d)), "model.norm.weight": 1 + 0.2 * rng.normal(size=d)}
    for i in range(c["num_hidden_layers"]):
        out |= layer_weights(rng, f"model.layers.{i}.", c)
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = rng.normal(size=(v, d))
    return out


def draft_weights(rng: np.random.Generator, c: dict[str, Any], target: Arrays) -> Arrays:
    d, v, r, m = c["hidden_size"], c["vocab_size"], c["markov_rank"], len(c["target_layer_ids"])
    table = target["model.embed_tokens.weight"]
    out = {
        "embed_tokens.weight": table,
        "lm_head.weight": target.get("lm_head.weight", table),
        "fc.weight": rng.normal(size=(d, m * d)) / np.sqrt(m * d),
        "hidden_norm.weight": 1 + 0.2 * rng.normal(size=d),
        "norm.weight": 1 + 0.2 * rng.normal(size=d),
    }
    for i in range(c["num_hidden_layers"]):
        out |= layer_weights(rng, f"layers.{i}.", c)
    if r:
        out |= {f"markov_head.markov_{w}.weight": rng.normal(size=(v, r)) for w in ("w1", "w2")}
    inner = {"gated": ("gate_proj", r, d + r), "rnn": ("joint_proj", 3 * r, 2 * r + d)}.get(c["markov_head_type"])
    if r and inner:
        out[f"markov_head.{inner[0]}.weight"] = rng.normal(size=inner[1:]) / np.sqrt(inner[2])
        out[f"markov_head.{inner[0]}.bias"] = 0.3 * rng.normal(size=inner[1])
    if c["enable_confidence_head"]:
        size = d + (r if c["confidence_head_with_markov"] else 0)
        out["confidence_head.proj.weight"] = rng.normal(size=(1, size)) / np.sqrt(size)
        out["confidence_head.proj.bias"] = 0.3 * rng.normal(size=1)
    return out


class MadeUp:
    """A case on disk and its models in NumPy."""

    def __init__(self, folder: Path, seed: int, target: dict[str, Any], draft: dict[str, Any]) -> None:
        rng = np.random.default_rng(seed)
        self.folder, self.rng = folder, rng
        target_config, draft_config = {**TARGET, **target}, {**DRAFT, **draft}
        weights = target_weights(rng, target_config)
        drafts = draft_weights(rng, draft_config, weights)
        self.target, self.drafter = Target(weights, target_config), Drafter(drafts, draft_config)
        for name, config, tensors in (("target", target_config, weights), ("draft", draft_config, drafts)):
            (folder / name).mkdir(parents=True)
            (folder / name / "config.json").write_text(json.dumps(config))
            save(folder / name / "model.safetensors", tensors)
        self.layer_ids: list[int] = draft_config["target_layer_ids"]
        self.threshold = 0.5

    def write(self, prompts: int) -> Arrays:
        """Writes case.json and the inputs; returns every array the case should have."""
        expected: Arrays = {}
        for i in range(prompts):
            expected |= self.prompt_arrays(f"p{i}", self.rng.integers(0, 37, 3 + 4 * i))
        expected |= self.teacher_forced(self.rng.integers(0, 37, 20), np.array([1, 4, 14]))
        inputs = (".prompt_ids", ".token", "tf.input_ids", "tf.anchors", ".threshold")
        np.savez(self.folder / "expected.npz", **{k: v for k, v in expected.items() if k.endswith(inputs)})  # type: ignore[arg-type]
        spec = {"kind": "qwen3_dspark", "target": "target", "draft": "draft", "expected": "expected.npz"}
        spec |= {"num_prompts": prompts, "max_new_tokens": NEW_TOKENS, "block_size": self.drafter.k}
        if self.drafter.config["enable_confidence_head"]:
            spec["confidence_threshold"] = self.threshold
        (self.folder / "case.json").write_text(json.dumps(spec))
        return expected

    def text(self, prompt: np.ndarray) -> np.ndarray:
        """The prompt and enough greedy tokens for the last block."""
        ids = prompt
        for _ in range(NEW_TOKENS + self.drafter.k + 1):
            ids = np.append(ids, np.argmax(self.target(ids, self.layer_ids)[2][-1]))
        return ids

    def prompt_arrays(self, name: str, prompt: np.ndarray) -> Arrays:
        text = self.text(prompt)
        last, features, logits = self.target(prompt, self.layer_ids)
        new = text[len(prompt) :][:NEW_TOKENS]
        every = np.sort(self.target(text, self.layer_ids)[2][len(prompt) - 1 :][:NEW_TOKENS], axis=-1)
        out = {
            f"{name}.prompt_ids": prompt,
            f"{name}.target_logits": logits,
            f"{name}.target_features": features,
            f"{name}.target_last_hidden": last,
            f"{name}.gen.output_ids": new,
            f"{name}.gen.target_greedy_ids": new,
            f"{name}.gen.target_margins": every[:, -1] - every[:, -2],
        }
        out |= self.run(f"{name}.gen", text, len(prompt), rounds=name)
        stops = {"stop": int(new[NEW_TOKENS // 2]), "stop2": int(new[3])}
        for kind, token in stops.items():
            out |= {f"{name}.{kind}.token": np.array(token)} | self.run(f"{name}.{kind}", text, len(prompt), stop=token)
        if self.drafter.config["enable_confidence_head"]:
            out[f"{name}.thr.threshold"] = np.array(self.threshold)
            out |= self.run(f"{name}.thr", text, len(prompt), threshold=self.threshold)
        return out

    def run(
        self,
        name: str,
        text: np.ndarray,
        start: int,
        *,
        stop: int | None = None,
        threshold: float | None = None,
        rounds: str = "",
    ) -> Arrays:
        """One generation by the contract: cut at a stop token and at the limit, no round once all is known."""
        n, k, before = start, self.drafter.k, 0
        features = self.target(text, self.layer_ids)[1]
        committed: list[int] = []
        accepted_drafts: list[int] = []
        offered: list[int] = []
        starts: list[int] = []
        margin, following = np.inf, start
        stored: Arrays = {}
        stopped = stop == text[n]
        while not stopped and start < n + NEW_TOKENS - 1:
            block = self.drafter.draft(features[:start], int(text[start]))
            width = (
                k if threshold is None else leading(block["confidence_logits"] >= np.log(threshold / (1 - threshold)))
            )
            drafts = block["draft_tokens"][:width]
            accepted = leading(drafts == text[start + 1 : start + 1 + width])
            best = np.sort(block["corrected_logits"], axis=-1)
            margin = min(margin, float((best[:, -1] - best[:, -2]).min()))
            if rounds and len(starts) < 3:
                cache = rounds == "p1" and len(starts) == 2
                stored |= self.round_arrays(f"{rounds}.r{len(starts)}", text, start, before, block, accepted, cache)
            emitted = text[start + 1 : start + 2 + accepted]
            count = accepted + 1
            if stop is not None and stop in emitted:
                stopped, at = True, emitted.tolist().index(stop)
                count = at + 1
                if at < accepted:
                    accepted = width = at + 1
            count = min(count, n + NEW_TOKENS - 1 - start)
            starts.append(start)
            committed.append(count)
            accepted_drafts.append(accepted)
            offered.append(width)
            before, start, following = start, start + count, start + accepted + 1
        if rounds and following == n + NEW_TOKENS - 1:  # the reference looks at one more round here
            best = np.sort(self.drafter.draft(features[:following], int(text[following]))["corrected_logits"], axis=-1)
            margin = min(margin, float((best[:, -1] - best[:, -2]).min()))
        lists = {
            "output_ids": text[n : start + 1],
            "acceptance_lengths": np.array(committed, int),
            "accepted_draft_lengths": np.array(accepted_drafts, int),
            "proposal_lengths": np.array(offered, int),
        }
        if rounds:
            lists |= {"round_starts": np.array(starts), "min_draft_margin": np.array(margin)}
        return stored | {f"{name}.{key}": value for key, value in lists.items()}

    def round_arrays(
        self,
        name: str,
        text: np.ndarray,
        start: int,
        before: int,
        block: Arrays,
        accepted: int,
        with_cache: bool,
    ) -> Arrays:
        k = self.drafter.k
        features = self.target(text, self.layer_ids)[1]
        sequence = np.concatenate([text[: start + 1], block["draft_tokens"]])
        verify = self.target(sequence, self.layer_ids)[2][start:]
        masks = [self.drafter.config["mask_token_id"]] * (k - 1)
        out = {
            **block,
            "start": np.array(start),
            "cache_len_before": np.array(before),
            "cache_len_after": np.array(start),
            "context_features": features[before:start],
            "block_input_ids": np.array([text[start], *masks]),
            "position_ids": np.arange(before, start + k),
            "verify_logits": verify,
            "accepted_draft_tokens": np.array(accepted),
            "next_token": np.argmax(verify[accepted]),
            "accept_rate_t1": overlap(block["corrected_logits"], verify[:k]),
        }
        if with_cache:
            out["cache_k"], out["cache_v"] = self.drafter.cache(features[:start])
        return {f"{name}.{key}": value for key, value in out.items()}

    def teacher_forced(self, ids: np.ndarray, anchors: np.ndarray) -> Arrays:
        k = self.drafter.k
        _, features, logits = self.target(ids, self.layer_ids)
        blocks = [self.drafter.draft(features[:a], int(ids[a]), given=ids[a + 1 : a + k + 1]) for a in anchors]
        rows = np.stack([logits[a : a + k] for a in anchors])
        drafts = np.stack([block["corrected_logits"] for block in blocks])
        labels = np.stack([ids[a + 1 : a + k + 1] for a in anchors])[..., None]
        out = {
            "input_ids": ids,
            "anchors": anchors,
            "accept_rate_t1": overlap(drafts, rows),
            "accept_rate_t06": overlap(drafts / 0.6, rows / 0.6),
            "draft_prob_of_label_t1": np.take_along_axis(softmax(drafts), labels, -1)[..., 0],
            "target_prob_of_label_t1": np.take_along_axis(softmax(rows), labels, -1)[..., 0],
        }
        if "confidence_logits" in blocks[0]:
            out["confidence_logits"] = np.stack([block["confidence_logits"] for block in blocks])
        return {f"tf.{key}": value for key, value in out.items()}


def leading(flags: np.ndarray | Sequence[bool]) -> int:
    """How many flags are true before the first false one."""
    return int(np.cumprod(np.asarray(flags, int)).sum())


def overlap(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """1 - total variation of two rows of logits."""
    return np.minimum(softmax(first), softmax(second)).sum(axis=-1)
