"""How sampling noise is keyed and shaped, so that both engines draw the same integers. Constants and words only; the arithmetic is each engine's own.

Generator: Philox4x32-10 (Salmon et al., 2011), a keyed bijection of 128-bit counters; block = four 32-bit words.

  key      (seed mod 2^32, seed div 2^32), seed from 0 to 2^64 - 1
  counter  (token id div 4, position, sample, purpose), 32 bits each
  word     token id mod 4 of that block belongs to the token id

`position` is the absolute position of the token that is being drawn: the position of the token whose logits decide, plus one. `sample` is the index
among the request's samples. A word therefore depends on (seed, sample, position, purpose, token id) and on nothing else: not on batch mates, the size
of the vocabulary or its padding, filters, chunking, preemption or speculation. Two requests with the same seed share their noise, as a seed promises.

From a word r to noise:

  w = min((r + 0.5) 2^-32, 1 - 2^-24)      never 0, never 1
  E = -log1p(-w)                           exponential, from 2^-33 to 16.64: never 0, never infinite
  G = -log(E)                              Gumbel, from -2.82 to 22.88

and the token is argmax(logit / temperature + G). Resolution is spent near w = 0, because a token of small probability wins only with a small E (a
large G): there w keeps the relative precision of its 32 bits, whereas -log(-log(u)) with u near 1 has steps of 2^-24 in fp32 and cannot give a G
above 16.7.

In fp32, w above 1/2 has lost the low bits of r, and -log1p(-w) inherits that (3 % of E near the clamp). The complement of a word is exact, so an fp32
engine takes
  E = -log1p(-(r + 0.5) 2^-32)                           for r < 2^31
  E = -log(max((2^32 - 1 - r + 0.5) 2^-32, 2^-24))       for r >= 2^31
which equals the definition and agrees with its fp64 value to 1e-6 relative over all words.
"""

from __future__ import annotations

from enum import IntEnum

PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # of counter words 0 and 2
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # added to the two key words between rounds
WORDS_PER_BLOCK = 4

LARGEST_UNIFORM = 1.0 - 2.0**-24  # the clamp of w: the largest fp32 number below 1


class Purpose(IntEnum):
    """What a word is drawn for; word 3 of the counter, so that draws for different ends never share noise."""

    DRAW = 0  # the token at a position, from the model's own distribution
    ACCEPT = 1  # whether a proposed token is accepted (speculation)
    RESAMPLE = 2  # the token at a position after a proposal was rejected
