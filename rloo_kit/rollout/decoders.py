"""One decoding step of all live rows, by the model's modules or fused, and the cache of their keys and values.

Live rows occupy the first slots: a row that ends is overwritten by the last live one, a new row goes after them.

Shapes: S slots, R live rows, L tokens up to the longest live row, G key-value heads, P prompt tokens, D head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rloo_kit.gradient import packing
from rloo_kit.plan.parts import CACHE_BLOCK, JOINED_LIMIT_BYTES

Stored = dict[int, torch.Tensor]  # by layer: (S, G, capacity, D)


class SlotCache:
    """The cache of all layers in the dtype of what is written; a layer is allocated on its first write.

    Attributes:
        mask: (R, 1, 1, L) bool of the current step, True where the row may attend, its own new token included.
        is_even: all rows of the current step are equally long, so the mask is True throughout.
        length: L of the current step.
    """

    def __init__(self, slots: int, block_tokens: int | None = None) -> None:
        self.slots, self.block_tokens = slots, block_tokens or CACHE_BLOCK
        self.capacity = 0  # tokens of a slot
        self.keys: Stored = {}
        self.values: Stored = {}
        self.mask: torch.Tensor
        self.is_even = False
        self.length = 0
        self._positions: torch.Tensor  # (R,), on the cache's device
        self._places: dict[int, torch.Tensor] = {}  # by G: (R * G,), where a row's heads write in the flat cache

    def insert(self, layer: int, first: int, count: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill the beginning of the slots `first` to `first + count` with one prompt's (G, P, D)."""
        self._reserve(keys.size(1))
        for store, new in ((self.keys, keys), (self.values, values)):
            self._layer(store, layer, new.size(0), new)[first : first + count, :, : new.size(1)] = new

    def begin(self, positions: list[int], device: torch.device) -> torch.Tensor:
        """Begin a step in which row r writes at `positions[r]`; returns the positions as (R,)."""
        self.length = max(positions) + 1
        self.is_even = min(positions) + 1 == self.length
        self._reserve(self.length)
        self._places = {}
        self._positions = torch.tensor(positions, device=device)
        self.mask = (torch.arange(self.length, device=device) <= self._positions[:, None])[:, None, None, :]
        return self._positions

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store this step's (R, G, D) and return views of the rows' keys and values, (R, G, L, D) each."""
        live, heads = keys.size(0), keys.size(1)
        if heads not in self._places:
            first = torch.arange(live * heads, device=keys.device).view(-1, heads) * self.capacity
            self._places[heads] = (first + self._positions[:, None]).flatten()
        for store, new in ((self.keys, keys), (self.values, values)):
            rows = self._layer(store, layer, heads, new)
            flat = rows.view(-1, rows.size(-1))  # (S * G * capacity, D)
            flat.index_copy_(0, self._places[heads], new.reshape(-1, new.size(-1)).to(rows.dtype))
        return self.keys[layer][:live, :, : self.length], self.values[layer][:live, :, : self.length]

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` tokens of the slots `sources` into the slots `targets`."""
        if not sources:
            return
        for store in (self.keys, self.values):
            for rows in store.values():
                rows[targets, :, :length] = rows[sources, :, :length]

    def shrink(self, slots: int) -> None:
        """Keep only the first `slots`; the others are freed when the cache grows next."""
        self.slots = min(self.slots, slots)

    def _layer(self, store: Stored, layer: int, heads: int, like: torch.Tensor) -> torch.Tensor:
        if layer not in store:  # zeros, not garbage: NaN times a weight of 0 is NaN
            store[layer] = like.new_zeros(self.slots, heads, self.capacity, like.size(-1))
        return store[layer]

    def _reserve(self, length: int) -> None:
        if length <= self.capacity:
            return
        old, self.capacity = self.capacity, -(-length // self.block_tokens) * self.block_tokens
        for store in (self.keys, self.values):
            for layer, rows in store.items():
                grown = rows.new_empty(self.slots, rows.size(1), self.capacity, rows.size(3))
                grown[:, :, :old] = rows[: self.slots]
                grown[:, :, old:] = 0
                store[layer] = grown


GROUPED = "rloo_grouped"  # the name of `attend_grouped` in transformers' table
MORE_THAN_A_MASK = ("sliding_window", "softcap", "s_aux", "position_bias")  # other arguments of an attention


class ModuleDecoder:
    """Runs the model's own modules, with `SlotCache` in place of their cache; made for one rollout.

    Attributes:
        groups_heads: whether a step uses `attend_grouped`, which needs SDPA through transformers' interface; else it
            uses the model's own attention.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.get_base_model() if hasattr(model, "peft_config") else model
        self.device = self.model.get_input_embeddings().weight.device
        attention = self.model.config.get_text_config()._attn_implementation
        self._float_mask = attention == "eager"
        self.groups_heads = attention in (packing.PLAIN, packing.NAME) and getattr(
            self.model, "_supports_attention_backend", False
        )

    def prefill(self, prompts: list[list[int]], cache: SlotCache, slots: list[tuple[int, int]]) -> None:
        """Put each prompt's keys and values into its slots, (first, count).

        Prompts are padded on the right: attention is causal, so no mask is needed.
        """
        width = max(map(len, prompts))
        ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], device=self.device)  # (B, P)
        filled = self.model.get_decoder()(input_ids=ids, use_cache=True).past_key_values
        for layer, states in enumerate(filled.layers):
            for number, (first, count) in enumerate(slots):
                length = len(prompts[number])
                keys, values = states.keys[number, :, :length], states.values[number, :, :length]  # (G, P, D)
                cache.insert(layer, first, count, self.arrange(keys), values)

    def arrange(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys in the decoder's order of dimensions, (G, P, D)."""
        return keys

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        """Feed `tokens` (R,) at `positions` (R,) after the cache's `begin`; returns logits (R, V)."""
        mask = cache.mask  # 4-D: every attention of transformers uses it unchanged
        if self._float_mask:
            kind = self.model.dtype
            mask = torch.zeros(mask.shape, dtype=kind, device=self.device).masked_fill_(~mask, torch.finfo(kind).min)
        if self.groups_heads and cache.is_even:
            mask = mask[..., :0]  # with None the model would build its own
        with _grouped_heads(self.model) if self.groups_heads else nullcontext():
            return self.model(
                input_ids=tokens[:, None],
                position_ids=positions[:, None],
                attention_mask=mask,
                past_key_values=_StepCache(cache),
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]


@contextmanager
def _grouped_heads(model: Any) -> Iterator[None]:
    """A block in which the model uses `attend_grouped`."""
    AttentionInterface.register(GROUPED, attend_grouped)
    AttentionMaskInterface.register(GROUPED, sdpa_mask)
    config = model.config.get_text_config()
    before, config._attn_implementation = config._attn_implementation, GROUPED
    try:
        yield
    finally:
        config._attn_implementation = before


def attend_grouped(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA for one new token per row: the H / G query heads that share keys and values become rows of one call.

    With a mask, transformers' own attention copies keys and values H / G times, in every layer for every token. The
    results are equal, so transformers' own handles what this does not: more than one token, or more than a mask.

    Args:
        query: (R, H, 1, D). key, value: (R, G, L, D). attention_mask: (R, 1, 1, L), empty if all rows see all tokens.

    Returns:
        (R, 1, H, D), and None for the weights.
    """
    mask = attention_mask if attention_mask is not None and attention_mask.numel() else None
    if query.size(2) != 1 or any(kwargs.get(name) is not None for name in MORE_THAN_A_MASK):
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    rows, heads, _, size = query.shape
    grouped = query.reshape(rows, key.size(1), heads // key.size(1), size)
    found = functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )  # (R, G, H / G, D)
    return found.reshape(rows, 1, heads, -1), None


class _StepCache:
    """The part of transformers' `Cache` that a model's forward calls when its mask and positions are given."""

    is_compileable = False

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_more: Any, **_named: Any) -> Any:
        """(R, G, 1, D) each in, (R, G, L, D) each out."""
        return self._cache.write(layer, keys[:, :, 0], values[:, :, 0])

    def get_seq_length(self, layer: int = 0) -> int:
        """Tokens before the step; unused, since positions are given."""
        return self._cache.length - 1


FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")  # angles that do not depend on the sequence's length
SCALING_KEYS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "embedding_multiplier")


class NotPlainError(Exception):
    """The model has a part that `FusedDecoder` does not support; the message names it."""


class _Layer(NamedTuple):
    """Weights of one layer, transposed for (R, in) @ (in, out)."""

    qkv: torch.Tensor  # (M, (H + 2 G) D)
    qkv_bias: torch.Tensor | None
    head_norm: torch.Tensor | None  # (H + G, D)
    head_eps: float
    out: torch.Tensor  # (H D, M)
    out_bias: torch.Tensor | None
    gate_up: torch.Tensor  # (M, 2 I)
    down: torch.Tensor  # (I, M)
    eps: tuple[float, float]  # of the norms before attention and before the MLP


class FusedDecoder(ModuleDecoder):
    """Prefills like `ModuleDecoder`, decodes with its own copy of the weights: fewer kernel launches for few rows.

    In the copy, the adapter is merged, projections are fused (q, k and v; gate and up), and norm weights are multiplied
    into the projection after them. Rotation is one complex product, so each head's dimensions are stored in pairs.
    Raises NotPlainError for 4-bit and 16-bit weights (a merged copy would be rounded), adapters of more than two
    matrices, copies above 1 GiB and scaled logits.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        config = self.model.config
        backbone = self.model.get_decoder()
        _check(self.model, backbone)
        attention = backbone.layers[0].self_attn
        self.head_size = attention.head_dim
        self.kv_heads = config.num_key_value_heads
        self.heads = config.num_attention_heads
        self._scale = attention.scaling
        half = self.head_size // 2
        self._pairs = torch.arange(self.head_size, device=self.device).view(2, half).t().flatten()
        self._layers = [self._read(layer) for layer in backbone.layers]
        self._embedding = self.model.get_input_embeddings().weight  # (V, M)
        self._norm, self._norm_eps = _norm_of(backbone.norm)
        self._head = self.model.get_output_embeddings()
        self._rotary = backbone.rotary_emb
        self._angles = self._rotate(64)

    def arrange(self, keys: torch.Tensor) -> torch.Tensor:
        """transformers' keys with each head's dimensions in pairs."""
        return keys[..., self._pairs]

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        """As `ModuleDecoder.decode`."""
        if cache.length > self._angles.size(0):
            self._angles = self._rotate(2 * cache.length)
        angles = self._angles[positions][:, None]  # (R, 1, D / 2)
        mask = None
        if not cache.is_even:
            mask = torch.zeros(cache.mask.shape, device=self.device).masked_fill_(~cache.mask, -torch.inf)
        rows, both = tokens.size(0), self.heads + self.kv_heads
        hidden = functional.embedding(tokens, self._embedding)  # (R, M)
        for number, layer in enumerate(self._layers):
            states = _normalise(hidden, layer.eps[0]) @ layer.qkv
            if layer.qkv_bias is not None:
                states = states + layer.qkv_bias
            states = states.view(rows, both + self.kv_heads, self.head_size)
            turned = states[:, :both]  # queries and keys, (R, H + G, D)
            if layer.head_norm is not None:
                turned = _normalise(turned, layer.head_eps) * layer.head_norm
            pairs = torch.view_as_complex(turned.unflatten(-1, (-1, 2)))  # (R, H + G, D / 2)
            turned = torch.view_as_real(pairs * angles).flatten(-2)
            keys, values = cache.write(number, turned[:, self.heads :], states[:, both:])
            queries = turned[:, : self.heads].reshape(
                rows, self.kv_heads, -1, self.head_size
            )  # a group's heads as rows
            found = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=self._scale)
            hidden = torch.addmm(hidden, found.reshape(rows, -1), layer.out)
            if layer.out_bias is not None:
                hidden = hidden + layer.out_bias
            gate, up = (_normalise(hidden, layer.eps[1]) @ layer.gate_up).chunk(2, dim=-1)
            hidden = torch.addmm(hidden, functional.silu(gate) * up, layer.down)
        return functional.linear(_normalise(hidden, self._norm_eps) * self._norm, self._head.weight, self._head.bias)

    def _rotate(self, length: int) -> torch.Tensor:
        """(length, D / 2) complex numbers that rotate pairs of dimensions."""
        places = torch.arange(length, device=self.device)[None]
        cosine, sine = (part[0] for part in self._rotary(self._embedding[:1], places))  # (length, D)
        half = self.head_size // 2
        if cosine.size(-1) != self.head_size or not torch.equal(cosine[:, :half], cosine[:, half:]):
            raise NotPlainError("rotates only a part of each head, or not in halves")
        return torch.complex(cosine[:, :half].contiguous(), sine[:, :half].contiguous())

    def _read(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        before_attention, eps = _norm_of(layer.input_layernorm)
        before_mlp, mlp_eps = _norm_of(layer.post_attention_layernorm)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        weights, biases = zip(*map(_linear, projections), strict=True)
        turned = [*map(self._pair_rows, weights[:2])]
        bias = None
        if biases[0] is not None:
            bias = torch.cat([*map(self._pair_rows, biases[:2]), biases[2]])
        head_norm, head_eps = None, 0.0
        if getattr(attention, "q_norm", None) is not None:
            (query_norm, head_eps), (key_norm, _) = _norm_of(attention.q_norm), _norm_of(attention.k_norm)
            parts = (query_norm.expand(self.heads, -1), key_norm.expand(self.kv_heads, -1))
            head_norm = torch.cat(parts)[:, self._pairs]
        out, out_bias = _linear(attention.o_proj)
        (gate, gate_bias), (up, up_bias), (down, down_bias) = map(_linear, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        if any(part is not None for part in (gate_bias, up_bias, down_bias)):
            raise NotPlainError("has biases in its MLP")
        return _Layer(
            qkv=(torch.cat([*turned, weights[2]]) * before_attention).t().contiguous(),
            qkv_bias=bias,
            head_norm=head_norm,
            head_eps=head_eps,
            out=out.t().contiguous(),
            out_bias=out_bias,
            gate_up=(torch.cat((gate, up)) * before_mlp).t().contiguous(),
            down=down.t().contiguous(),
            eps=(eps, mlp_eps),
        )

    def _pair_rows(self, weight: torch.Tensor) -> torch.Tensor:
        """A projection's output rows, (heads * D, ...), with each head's dimensions in pairs."""
        return weight.unflatten(0, (-1, self.head_size))[:, self._pairs].flatten(0, 1)


def _check(model: Any, backbone: Any) -> None:
    config = model.config
    needed = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
    for layer, (part, names) in product(backbone.layers, needed.items()):
        if not all(hasattr(getattr(layer, part, None), name) for name in names):
            raise NotPlainError(f"has another kind of {part}")
    if config.hidden_act != "silu" or any(getattr(config, key, None) not in (None, 1.0) for key in SCALING_KEYS):
        raise NotPlainError("has another activation, or scales what it embeds or predicts")
    if getattr(getattr(backbone, "rotary_emb", None), "rope_type", None) not in FIXED_ROTATIONS:
        raise NotPlainError("has positions of another kind")
    for module, kind in ((model.get_input_embeddings(), torch.nn.Embedding), (model.get_output_embeddings(), None)):
        if type(module) is not (kind or torch.nn.Linear) or module.weight.dtype != torch.float32:
            raise NotPlainError("has an embedding or a head that is not plain float32")
    size = sum(parameter.numel() for parameter in backbone.layers.parameters()) * 4
    if size > JOINED_LIMIT_BYTES:
        raise NotPlainError(f"has {size / 2**30:.1f} GiB of weights to copy")


def _normalise(states: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale the last dimension to a root mean square of 1."""
    length = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    return states * length.square_().mul_(1 / states.size(-1)).add_(eps).rsqrt_()


def _norm_of(module: Any) -> tuple[torch.Tensor, float]:
    """Weight and epsilon of a root-mean-square norm."""
    if not hasattr(module, "variance_epsilon") or module.weight.dtype != torch.float32:
        raise NotPlainError("has norms of another kind")
    return module.weight, module.variance_epsilon


def _linear(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight (out, in), with the active adapters added in a copy, and bias."""
    base = module.base_layer if hasattr(module, "lora_A") else module
    if type(base) is not torch.nn.Linear or base.weight.dtype != torch.float32:
        raise NotPlainError("has projections that are not plain float32")
    weight = base.weight
    if base is not module and not module.disable_adapters and not module.merged:
        for name in module.active_adapters:
            if name not in module.lora_A:
                continue
            if name in module.lora_variant or module.lora_B[name].bias is not None:
                raise NotPlainError("has an adapter that is more than two matrices")
            weight = weight + module.get_delta_weight(name).to(torch.float32)
    return weight, base.bias
