"""What the inputs and outputs of an exported model are.

| name | type | shape | what |
|---|---|---|---|
| `x.{l}` | f32 | [batch, tokens, dim] | input of layer l, rounded to bf16 first |
| `start_pos` | int64 | [] | position of the first token; the same for all sequences of the batch |
| `past_window.{l}` | uint8 | [batch, past_window_rows.{l}, bytes] | packed window rows of the newest tokens |
| `past_latent.{l}` | uint8 | [batch, past_groups.{l}, bytes] | packed latents, one per group (sources of latents) |
| `past_key.{l}` | uint8 | [batch, past_groups.{l}, bytes] | packed index keys, one per group |
| `past_members.{l}` | f32 | [batch, past_member_rows.{l}, 2, head_dim] | kv, gate of the unfinished group (ratio > 1) |
| `past_published_key` | uint8 | [batch, rows, bytes] | keys of the layer that last completed a group (published) |
| `y.{l}` | f32 | [batch, tokens, dim] | output of layer l: bf16 values |
| `present_*` | | | the caches after these tokens: the next call's `past_*` |
| `selection.{l}` | int64 | [batch, tokens, selected.{l}] | selected compressed positions, ascending, then -1 |
| `candidates.{l}` | int64 | [batch, tokens, candidate_blocks.{l}] | candidate blocks, ascending, then -1 |
"""

from __future__ import annotations

MODEL = (
    "DeepSeek-V4.1 sparse attention. Feed x.{layer} [batch, tokens, dim], start_pos (tokens so far) and past_*; "
    "the first call has past_* with 0 rows; later calls take present_* of the call before as past_*. All values "
    "are bf16 numbers carried as float32; caches are packed bytes."
)

_WHAT = {
    "x": "Input of the layer, f32 [batch, tokens, dim]; rounded to bf16 first.",
    "start_pos": "Position of the first token of x: tokens that all sequences of the batch have seen.",
    "past_window": "Packed window rows (e4m3 codes, then e8m0 scales) of the newest tokens, oldest first.",
    "past_latent": "Packed latents (two e2m1 codes a byte, then e4m3 scales), one row per complete group.",
    "past_key": "Packed index keys (two e2m1 codes a byte, then e8m0 scales), one row per complete group.",
    "past_members": "kv and gate of the start_pos % ratio tokens whose group is not complete.",
    "past_published_key": "Index keys of the layer that last completed a group.",
    "y": "Output of the layer: bf16 values, f32 [batch, tokens, dim].",
    "selection": "Selected compressed positions of each token, ascending, then -1.",
    "candidates": "Candidate blocks of each token, ascending, then -1.",
}


def describe(name: str) -> str:
    """Doc string of an input or output, empty for a weight."""
    base = name.split(".")[0]
    if base in _WHAT:
        return _WHAT[base]
    if base.startswith("present_"):
        return _WHAT["past_" + base.removeprefix("present_")] + " After these tokens."
    return ""
