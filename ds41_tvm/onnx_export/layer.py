"""The graph of some layers: one node per operator of the layer, caches and selections as inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from onnx import TensorProto, ValueInfoProto, helper

from ds41_tvm.checkpoint.tensors import expected_tensors, prefix
from ds41_tvm.config import FP8_LINEARS, AttentionConfig, LayerRole
from ds41_tvm.numerics.formats import row_bytes
from ds41_tvm.onnx_export import attention, candidates, compressor, indexer, linear, norm, quantize, rope, topk
from ds41_tvm.onnx_export.builder import END, Body, Library
from ds41_tvm.onnx_export.formats import round_bf16
from ds41_tvm.onnx_export.output import output_groups
from ds41_tvm.program import SELECTING
from ds41_tvm.reference.rope import rope_frequencies

UINT8, FLOAT, INT64, BOOL = TensorProto.UINT8, TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
PUBLISHED = "published_key"


@dataclass
class _Step:
    """Values that all layers of one ratio share."""

    positions: str
    cos: str
    sin: str
    cos_heads: str
    sin_heads: str


class LayerGraph:
    """Writes the nodes of `layers`; `inputs` and `outputs` fill up on the way, in the order of use."""

    def __init__(
        self, config: AttentionConfig, layers: Iterable[int], linear_mode: str, keys: str, library: Library
    ) -> None:
        self.config = config
        self.layers = tuple(layers)
        self.linear_mode = linear_mode
        self.keys = keys
        self.body = Body(library)
        self.inputs: dict[str, ValueInfoProto] = {}
        self.outputs: dict[str, ValueInfoProto] = {}
        self.weights: dict[str, None] = {}
        self._shapes = {spec.name: spec.shape for layer in self.layers for spec in expected_tensors(config, layer)}
        self._steps: dict[bool, _Step] = {}
        self._published = ""
        self._build()

    def _build(self) -> None:
        c = self.config
        for layer in self.layers:
            self._input(f"x.{layer}", FLOAT, ("batch", "tokens", c.dim))
        self._input("start_pos", INT64, ())
        full = [layer for layer in self.layers if c.role(layer).kind == "full"]
        if self.keys == "published" and full:
            bytes_ = row_bytes("index", c.index_head_dim)
            self._published = self._input(f"past_{PUBLISHED}", UINT8, ("batch", f"past_{PUBLISHED}s", bytes_))
        for layer in self.layers:
            self._layer(c.role(layer))
        if self._published:
            shape = ("batch", f"{PUBLISHED}s", row_bytes("index", c.index_head_dim))
            name = self.body.op("Identity", self._published, name=f"present_{PUBLISHED}")
            self._output(name, UINT8, shape)

    # ---- one layer

    def _layer(self, role: LayerRole) -> None:
        c, b, layer = self.config, self.body, role.layer
        name = f"layer{layer}"
        x = b.call(round_bf16, f"x.{layer}", name=f"{name}.x")
        step = self._shared(role, x)
        turn, back = rope.rotate(c.rope_head_dim), rope.rotate(c.rope_head_dim, inverse=True)

        qr = self._norm(role, "q_norm", self._linear(role, "wq_a", x))
        q = b.op("Reshape", self._linear(role, "wq_b", qr), b.i64([0, 0, c.n_heads, c.head_dim]), name=f"{name}.heads")
        q = b.call(turn, q, step.cos_heads, step.sin_heads, name=f"{name}.q")
        kv = self._norm(role, "kv_norm", self._linear(role, "wkv", x))
        kv = b.call(turn, kv, step.cos, step.sin, name=f"{name}.kv")
        window, seen = self._window(role, x, kv)
        parts, exists = [window], [seen]

        if role.ratio > 0:
            if role.kind == "full":
                self._compress(role, x)
            if role.kind in ("full", "reindex"):
                self._select(role, x, qr, step)
            source = self._needed("selection", role.index_source)
            latents = self._needed("present_latent", role.kv_source)
            picked, chosen = b.call(attention.gather_selected, latents, source, name=f"{name}.gather_selected")
            unpack = quantize.unpack_rows("latent", c.head_dim)
            parts.append(b.call(unpack, picked, name=f"{name}.selected_rows"))
            exists.append(chosen)
        rows = b.op("Concat", *parts, axis=2, name=f"{name}.rows") if len(parts) > 1 else parts[0]
        shown = b.op("Concat", *exists, axis=2, name=f"{name}.exists") if len(parts) > 1 else exists[0]

        sink = self._weight(role, "attn_sink")
        o = b.call(attention.sparse_attention(c.head_dim**-0.5), q, rows, shown, sink, name=f"{name}.attention")
        o = b.call(back, o, step.cos_heads, step.sin_heads, name=f"{name}.o")
        wo_a = self._weight(role, "wo_a.weight")
        y = b.call(
            output_groups(c.o_groups, c.o_lora_rank, c.n_heads * c.head_dim // c.o_groups), o, wo_a, name=f"{name}.wo_a"
        )
        self._linear(role, "wo_b", y, result=f"y.{layer}")
        self._output(f"y.{layer}", FLOAT, ("batch", "tokens", c.dim))

    def _shared(self, role: LayerRole, x: str) -> _Step:
        compressed = role.ratio > 0
        if compressed not in self._steps:
            b, title = self.body, "compressed" if compressed else "window"
            tokens = b.arange(b.size(x, 1))
            positions = b.op("Add", tokens, "start_pos", name=f"positions.{title}")
            cos, sin = b.call(rope.rope_table, positions, self._freqs(role), name=f"rope.{title}")
            heads = [b.op("Unsqueeze", part, b.i64([1]), name=f"{part}.heads") for part in (cos, sin)]
            self._steps[compressed] = _Step(positions, cos, sin, *heads)
        return self._steps[compressed]

    def _freqs(self, role: LayerRole) -> str:
        return self.body.f32(rope_frequencies(self.config, role.ratio))

    def _window(self, role: LayerRole, x: str, kv: str) -> tuple[str, str]:
        """The window rows of each query; leaves the newest rows for the next step."""
        c, b, layer = self.config, self.body, role.layer
        width = row_bytes("window", c.head_dim)
        past = self._input(f"past_window.{layer}", UINT8, ("batch", f"past_window_rows.{layer}", width))
        new = b.call(quantize.pack_rows("window", c.head_dim), kv, name=f"layer{layer}.new_window")
        rows = b.op("Concat", past, new, axis=1, name=f"layer{layer}.window")
        kept = b.slice(rows, b.i64([-c.window_size]), b.i64([END]), 1, name=f"present_window.{layer}")
        self._output(kept, UINT8, ("batch", f"window_rows.{layer}", width))
        gather = attention.gather_window(c.window_size)
        picked, exists = b.call(gather, rows, x, name=f"layer{layer}.gather_window")
        unpack = quantize.unpack_rows("window", c.head_dim)
        values = b.call(unpack, picked, name=f"layer{layer}.window_rows")
        # One mask for all sequences; as many axes as the selection's.
        shape = b.op("Shape", values, end=3)
        return values, b.op("Expand", exists, shape, name=f"layer{layer}.window_exists")

    def _compress(self, role: LayerRole, x: str) -> None:
        """Latents and index keys of the groups that these tokens complete, appended to the caches."""
        c, b, layer, ratio = self.config, self.body, role.layer, role.ratio
        name = f"layer{layer}"
        if ratio == 1:
            pooled = self._linear(role, "compressor.wkv", x)
        else:
            pooled = self._pool(role, x)
        latent = self._norm(role, "compressor.norm", pooled)
        past = {
            what: self._input(f"past_{what}.{layer}", UINT8, ("batch", f"past_groups.{layer}", row_bytes(kind, dim)))
            for what, kind, dim in self._compressed()
        }
        group = b.op("Add", b.arange(b.size(latent, 1)), b.size(past["latent"], 1))
        places = b.op("Mul", group, b.i64(ratio), name=f"{name}.group_positions")
        cos, sin = b.call(rope.rope_table, places, self._freqs(role), name=f"{name}.group_rope")
        turn = rope.rotate(c.rope_head_dim)
        key = self._norm(role, "indexer.k_norm", self._linear(role, "indexer.wk", latent))
        rows = {
            "latent": b.call(turn, latent, cos, sin, name=f"{name}.latent"),
            "key": b.call(turn, key, cos, sin, name=f"{name}.key"),
        }
        for what, kind, dim in self._compressed():
            new = b.call(quantize.pack_rows(kind, dim), rows[what], name=f"{name}.new_{what}")
            present = b.op("Concat", past[what], new, axis=1, name=f"present_{what}.{layer}")
            self._output(present, UINT8, ("batch", f"groups.{layer}", row_bytes(kind, dim)))
        if self._published:
            self._publish(role, past["latent"])

    def _compressed(self) -> tuple[tuple[str, Literal["latent", "index"], int], ...]:
        return ("latent", "latent", self.config.head_dim), ("key", "index", self.config.index_head_dim)

    def _pool(self, role: LayerRole, x: str) -> str:
        c, b, layer, ratio = self.config, self.body, role.layer, role.ratio
        sides = []
        for which in ("wkv", "wgate"):
            weight = self._weight(role, f"compressor.{which}.weight")
            side = b.call(linear.linear_f32, x, weight, name=f"layer{layer}.compressor.{which}")
            sides.append(b.op("Unsqueeze", side, b.i64([2])))
        new = b.op("Concat", *sides, axis=2, name=f"layer{layer}.new_members")
        shape = ("batch", f"past_member_rows.{layer}", 2, c.head_dim)
        past = self._input(f"past_members.{layer}", FLOAT, shape)
        members = b.op("Concat", past, new, axis=1, name=f"layer{layer}.members")
        split = compressor.split_groups(ratio)
        left = f"present_members.{layer}"
        results = [f"layer{layer}.group_kv", f"layer{layer}.group_gate", left]
        kv, gate, _ = b.call(split, members, name=f"layer{layer}.split_groups", results=results)
        self._output(left, FLOAT, ("batch", f"member_rows.{layer}", 2, c.head_dim))
        return b.call(compressor.pool_groups(ratio), kv, gate, name=f"layer{layer}.pool")  # type: ignore[no-any-return]

    def _publish(self, role: LayerRole, past: str) -> None:
        """The published keys are this layer's if it completed a group, else they stay."""
        b, mine = self.body, f"present_key.{role.layer}"
        completed = b.op("Sub", b.size(mine, 1), b.size(past, 1))
        flag = b.op("Min", completed, b.i64([1]))
        other = b.op("Sub", b.i64([1]), flag)
        parts = [
            b.slice(keys, b.i64([0]), b.op("Mul", b.size(keys, 1), which), 1)
            for keys, which in ((mine, flag), (self._published, other))
        ]
        self._published = b.op("Concat", *parts, axis=1, name=f"layer{role.layer}.published")

    def _select(self, role: LayerRole, x: str, qr: str, step: _Step) -> None:
        """The compressed positions that each query attends to."""
        c, b, layer = self.config, self.body, role.layer
        name, heads, dim = f"layer{layer}", c.index_n_heads, c.index_head_dim
        q = b.op(
            "Reshape", self._linear(role, "indexer.wq_b", qr), b.i64([0, 0, heads, dim]), name=f"{name}.index_heads"
        )
        q = b.call(rope.rotate(c.rope_head_dim), q, step.cos_heads, step.sin_heads, name=f"{name}.index_turned")
        flat = b.op("Reshape", q, b.i64([0, 0, heads * dim]))
        flat = b.call(quantize.round_trip("index", heads * dim), flat, name=f"{name}.index_rounded")
        q = b.op("Reshape", flat, b.i64([0, 0, heads, dim]), name=f"{name}.index_q")
        w = self._linear(role, "indexer.weights_proj", x)
        w = b.call(indexer.scale_weights(heads, dim), w, name=f"{name}.index_weights")
        packed = self._needed("present_key", role.kv_source)
        length = b.size(packed, 1)
        if self._published:
            # Another layer's keys may be fewer: zero rows follow them.
            missing = b.op("Max", b.op("Sub", length, b.size(self._published, 1)), b.i64([0]))
            pads = b.op("Concat", b.i64([0, 0, 0, 0]), missing, b.i64([0]), axis=0)
            padded = b.op("Pad", self._published, pads)
            packed = b.slice(padded, b.i64([0]), length, 1, name=f"{name}.scored_keys")
        keys = b.op("Unsqueeze", packed, b.i64([1]))
        keys = b.call(quantize.unpack_rows("index", dim), keys, name=f"{name}.keys")
        scores = b.call(indexer.index_scores(heads), q, keys, w, name=f"{name}.scores")
        visible = b.call(indexer.visible_positions(role.ratio), step.positions, name=f"{name}.visible")
        allowed = b.constant(True, bool)
        if role.candidate_source is not None:
            blocks = self._needed("candidates", role.candidate_source)
            inside = candidates.candidate_positions(c.candidate_block_size)
            allowed = b.call(inside, blocks, length, name=f"{name}.allowed")
        ranks = b.call(indexer.rank_scores, scores, visible, allowed, name=f"{name}.ranks")
        if role.is_candidate_source:
            choose = candidates.candidate_blocks(c.candidate_topk_blocks, c.candidate_block_size)
            made = b.call(choose, ranks, visible, name=f"candidates.{layer}", results=[f"candidates.{layer}"])
            self._output(made, INT64, ("batch", "tokens", f"candidate_blocks.{layer}"))
        chosen = b.call(
            topk.select_best(c.index_topk), ranks, name=f"selection.{layer}", results=[f"selection.{layer}"]
        )
        self._output(chosen, INT64, ("batch", "tokens", f"selected.{layer}"))

    # ---- values and weights

    def _needed(self, what: str, source: int | None) -> str:
        """A value that layer `source` leaves in this step: a graph input where that layer is in another file."""
        name = f"{what}.{source}"
        if source in self.layers:
            return name
        c = self.config
        shapes = {
            "present_latent": (UINT8, f"groups.{source}", row_bytes("latent", c.head_dim)),
            "present_key": (UINT8, f"groups.{source}", row_bytes("index", c.index_head_dim)),
        }
        if what in shapes:
            dtype, rows, width = shapes[what]
            return self._input(name, dtype, ("batch", rows, width))
        last = {"selection": "selected", "candidates": "candidate_blocks"}[what]
        return self._input(name, INT64, ("batch", "tokens", f"{last}.{source}"))

    def _linear(self, role: LayerRole, name: str, x: str, result: str | None = None) -> str:
        b, title = self.body, f"layer{role.layer}.{name}"
        results = None if result is None else [result]
        wide = name in SELECTING and role.kind in ("full", "reindex")
        weight = self._weight(role, f"{name}.weight")
        if self.linear_mode == "fp8" and name in FP8_LINEARS:
            rows, columns = self._shapes[weight]
            function = linear.linear_fp8(rows, columns, wide)
            scale = self._weight(role, f"{name}.scale")
            return b.call(function, x, weight, scale, name=title, results=results)  # type: ignore[no-any-return]
        function = linear.linear_wide if wide else linear.linear
        return b.call(function, x, weight, name=title, results=results)  # type: ignore[no-any-return]

    def _norm(self, role: LayerRole, name: str, x: str) -> str:
        weight = self._weight(role, f"{name}.weight")
        return self.body.call(norm.rms_norm(self.config.norm_eps), x, weight, name=f"layer{role.layer}.{name}")  # type: ignore[no-any-return]

    def _weight(self, role: LayerRole, name: str) -> str:
        full = prefix(role.layer) + name
        self.weights.setdefault(full)
        return full

    def _input(self, name: str, dtype: int, shape: tuple[str | int, ...]) -> str:
        self.inputs.setdefault(name, helper.make_tensor_value_info(name, dtype, shape))
        return name

    def _output(self, name: str, dtype: int, shape: tuple[str | int, ...]) -> None:
        self.outputs[name] = helper.make_tensor_value_info(name, dtype, shape)
