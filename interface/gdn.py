"""GatedDeltaNet: the shape of a hybrid model's linear-attention layers, and which layers they are. None of their arithmetic.

Fields and defaults follow the model specification, section 1.2; the layer itself is section 3.4.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinfer.fields import Fields


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Gated DeltaNet layers. Value head j belongs to key head j // (num_value_heads / num_key_heads).

    layers          [num_layers]: whether layer i is one; the others are full attention
    conv_kernel     taps of the causal convolution, its own token included: a sequence carries conv_kernel - 1 tokens
    interleaved     how a file stores the input projections: by key head in two matrices (qwen3_next), or q, k, v one after another, and z, b and a apart
    """

    layers: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    interleaved: bool

    @property
    def key_dim(self) -> int:
        """Width of all queries of a token, and of all keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of all values of a token, of its gate z, and of the layer's output before the last projection."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys and values, in this order."""
        return 2 * self.key_dim + self.value_dim

    @property
    def projection_dim(self) -> int:
        """Width of all four input projections together: the convolution's channels, the gate z, and b and a of each value head."""
        return self.conv_dim + self.value_dim + 2 * self.num_value_heads

    @property
    def conv_history(self) -> int:
        """Tokens before its own that the convolution reads."""
        return self.conv_kernel - 1

    def num_parameters(self, hidden_size: int) -> int:
        """Parameters of one such layer, without the layer's two norms and its feed forward."""
        projections = hidden_size * (self.projection_dim + self.value_dim)
        return projections + self.conv_dim * self.conv_kernel + 2 * self.num_value_heads + self.value_head_dim


def read_gdn(read: Fields, num_layers: int, *, interleaved: bool) -> GatedDeltaNet:
    """A hybrid type's fields. A list of layer types wins over full_attention_interval."""
    kinds = read.data.get("layer_types")
    if kinds is None:
        interval = read.count("full_attention_interval")
        layers = tuple((i + 1) % interval != 0 for i in range(num_layers))
    else:
        listed = read.each("layer_types", kinds, num_layers, ("full_attention", "linear_attention"))
        layers = tuple(kind == "linear_attention" for kind in listed)
    key_heads, value_heads = read.count("linear_num_key_heads"), read.count("linear_num_value_heads")
    if value_heads % key_heads:
        read.refuse("linear_num_value_heads", value_heads, f"is not a multiple of linear_num_key_heads = {key_heads}")
    # Kept in the files and read by nobody else: each has one value that this arithmetic is.
    read.only("output_gate_type", "swish", "silu")
    read.only("mamba_ssm_dtype", "float32")
    return GatedDeltaNet(
        layers=layers,
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=read.count("linear_key_head_dim"),
        value_head_dim=read.count("linear_value_head_dim"),
        conv_kernel=read.count("linear_conv_kernel_dim", least=2),
        interleaved=interleaved,
    )
