# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Greedy decoding with a key-value cache, ragged prompts and an early stop; bounds, vmap and gradients of such loops.
#     answers: [google/flax#4819, google/flax#4700, google-deepmind/mujoco#1207, jax-ml/jax#4473, jax-ml/jax#29842]
#     symptoms:
#       - decoding with a cache gives other tokens than without
#       - a finished sequence loses its last token
#       - prompts of different length in one batch
#       - generation does not stop at the end-of-sequence token
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # Decode in a while loop
#
# Carry the model, the tokens, each row's position and a mask of the rows that are done through
# `nnx.while_loop`. The key-value cache is an `nnx.Cache` of the model and has its full size before the loop.
#
# ## Do this

# %% tags=["snippet"]
import jax
import jax.numpy as jnp
from flax import nnx


class Attention(nnx.Module):
    """Causal self-attention. `cache_shape`: batch size and longest sequence, or None for no cache."""

    def __init__(self, features: int, num_heads: int, cache_shape, *, rngs: nnx.Rngs):
        heads = (num_heads, features // num_heads)
        self.qkv = nnx.LinearGeneral(features, (3, *heads), rngs=rngs)
        self.out = nnx.LinearGeneral(heads, features, axis=(-2, -1), rngs=rngs)
        self.keys = nnx.Cache(jnp.zeros((*cache_shape, *heads))) if cache_shape else None
        self.values = nnx.Cache(jnp.zeros((*cache_shape, *heads))) if cache_shape else None

    def __call__(self, x, positions):
        query, keys, values = jnp.moveaxis(self.qkv(x), 2, 0)
        if self.keys is not None:
            rows = jnp.arange(len(x))[:, None]
            self.keys[...] = keys = self.keys[...].at[rows, positions].set(keys)
            self.values[...] = values = self.values[...].at[rows, positions].set(values)
        mask = jnp.arange(keys.shape[1]) <= positions[..., None]
        return self.out(nnx.dot_product_attention(query, keys, values, mask=mask[:, None]))


def prefill(model, prompts, lengths, eos):
    """Fill the cache from the prompts, and make what the loop starts with."""
    (batch_size, max_length), width = model.cache_shape, prompts.shape[1]
    model(prompts, jnp.broadcast_to(jnp.arange(width), prompts.shape))
    tokens = jnp.full((batch_size, max_length), eos).at[:, :width].set(prompts)
    return tokens, lengths - 1, lengths == max_length


def decode_step(model, tokens, position, done, eos):
    """Append one token to every row that is not done."""
    rows, max_length = jnp.arange(len(tokens)), tokens.shape[1]
    last = tokens[rows, position]
    logits = model(last[:, None], position[:, None])[:, 0]
    token = jnp.where(done, last, logits.argmax(-1))
    position = jnp.where(done, position, position + 1)
    done |= (token == eos) | (position == max_length - 1)
    return tokens.at[rows, position].set(token), position, done


def unfinished(carry):
    *_, done = carry
    return ~done.all()


@nnx.jit
def greedy_decode(model, prompts, lengths, eos):
    """Prompts (batch, width) of 1 token or more, padded at the right. Returns (batch, max_length), lengths."""

    def body(carry):
        model, *rest = carry
        return model, *decode_step(model, *rest, eos)

    carry = (model, *prefill(model, prompts, lengths, eos))
    _, tokens, position, _ = nnx.while_loop(unfinished, body, carry)
    return tokens, position + 1


# %% [markdown]
# `model(tokens, positions)` returns logits; `model.cache_shape` is the shape of `tokens`. What lies beyond a
# row's length in the result is padding.
#
# - **One call fills the cache from all prompts**, padding included. A query sees the keys up to its own
#   position, and the loop overwrites a padded place before it gets there. So no cache needs a reset.
# - **The loop starts at the last token of the prompt.** One iteration makes one token for each row.
# - **A row that is done writes its last token again** at the same place, until the loop ends for all.
# - **`lengths` and `eos` are traced.** New prompts of the same width do not compile anew.
#
# ## The same tokens as without a cache
#
# The reference decodes each prompt alone, without padding or cache, and runs the whole sequence for every
# token. The weights are fixed, and the best logit leads so far that no token hangs on rounding. The model
# counts its calls.

# %%
import numpy as np

VOCABULARY, MAX_LENGTH = 11, 24


class Decoder(nnx.Module):
    def __init__(self, cache_shape, rngs: nnx.Rngs):
        self.cache_shape = cache_shape
        self.embed = nnx.Embed(VOCABULARY, 16, rngs=rngs)
        self.place = nnx.Embed(MAX_LENGTH, 16, rngs=rngs)
        self.layer0 = Attention(16, 2, cache_shape, rngs=rngs)
        self.layer1 = Attention(16, 2, cache_shape, rngs=rngs)
        self.head = nnx.Linear(16, VOCABULARY, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), int))

    def layers(self, x, positions):
        x = x + self.layer0(x, positions)
        return x + self.layer1(x, positions)

    def __call__(self, tokens, positions):
        self.calls[...] += 1
        return self.head(self.layers(self.embed(tokens) + self.place(positions), positions))


def fixed(decoder, cache_shape):
    """A decoder whose weights do not depend on the release."""
    graphdef, params, rest = nnx.split(
        nnx.eval_shape(lambda: decoder(cache_shape, nnx.Rngs(0))), nnx.Param, ...
    )
    draw = np.random.RandomState(104).normal
    params = jax.tree.map(lambda a: jnp.asarray(draw(0, 0.5, a.shape), a.dtype), params)
    return nnx.merge(graphdef, params, jax.tree.map(lambda a: jnp.asarray(np.zeros(a.shape, a.dtype)), rest))


without_cache = fixed(Decoder, None)
all_logits = nnx.jit(lambda model, tokens: model(tokens, jnp.arange(MAX_LENGTH)[None]))


def decode_without_cache(prompt, eos):
    """The tokens, and how far the best logit led at the closest decision."""
    tokens, lead = list(prompt), np.inf
    while len(tokens) < MAX_LENGTH and (tokens == prompt or tokens[-1] != eos):
        padded = np.array([tokens + [0] * (MAX_LENGTH - len(tokens))])
        logits = np.array(all_logits(without_cache, padded))[0, len(tokens) - 1]
        tokens.append(int(logits.argmax()))
        lead = min(lead, np.ptp(np.sort(logits)[-2:]))
    return tokens, lead


# %% tags=["proof"]
prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]
lengths = np.array([len(prompt) for prompt in prompts])
padded = np.array([prompt + [7] * (5 - len(prompt)) for prompt in prompts])


def compare(decode, model, eos):
    """Assert that each row is its prompt decoded alone. The new tokens, and the iterations."""
    calls = int(model.calls[...])
    tokens, ends = decode(model, padded, lengths, eos)
    rows = [row[:end].tolist() for row, end in zip(np.array(tokens), ends)]
    for prompt, row in zip(prompts, rows, strict=True):
        alone, lead = decode_without_cache(prompt, eos)
        assert row == alone and lead > 0.1
    new = [row[len(prompt) :] for prompt, row in zip(prompts, rows)]
    return new, int(model.calls[...]) - calls - 1  # one call is that of the prompts


model = fixed(Decoder, (3, MAX_LENGTH))
new, iterations = compare(greedy_decode, model, eos=0)
for prompt, row in zip(prompts, new):
    print(f"{prompt!s:16}", row)
print("iterations:", iterations)
assert len(set(map(len, new))) == 3 and all(row[-1] == 0 for row in new), "each stops, at another place"
assert iterations == max(map(len, new)) < MAX_LENGTH - max(lengths)

until_full, iterations = compare(greedy_decode, model, eos=-1)
assert iterations == MAX_LENGTH - min(lengths) and [len(row) for row in until_full] == [19, 22, 21]
print("iterations when no row stops:", iterations)
assert greedy_decode.jitted_fn._cache_size() == 1, "another `eos` is no other program"

*_, done = nnx.jit(prefill)(model, np.full((3, MAX_LENGTH), 7), np.array([MAX_LENGTH, 1, MAX_LENGTH]), 0)
assert done.tolist() == [True, False, True], "a prompt without a place for one more token is done at once"

# %% [markdown]
# ## Layers that are scanned and rematerialized
#
# Stack the layers with `nnx.vmap`: their caches get a leading axis too. Such a model failed in
# `nnx.while_loop` in [google/flax#4819](https://github.com/google/flax/issues/4819). It works under every
# release shown.


# %% tags=["proof"]
class ScannedDecoder(Decoder):
    def __init__(self, cache_shape, rngs: nnx.Rngs):
        super().__init__(cache_shape, rngs)
        del self.layer0, self.layer1
        stack = nnx.vmap(lambda rngs: Attention(16, 2, cache_shape, rngs=rngs))
        self.stack = nnx.split_rngs(splits=2)(stack)(rngs)

    def layers(self, x, positions):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def body(x, layer):
            return x + layer(x, positions)

        return body(x, self.stack)


scanned, params = fixed(ScannedDecoder, (3, MAX_LENGTH)), nnx.state(model, nnx.Param)
params["stack"] = jax.tree.map(lambda *a: jnp.stack(a), params.pop("layer0"), params.pop("layer1"))
nnx.update(scanned, params)
assert compare(greedy_decode, scanned, eos=0) == (new, max(map(len, new)))
print("the same tokens, caches of", scanned.stack.keys.shape)

# %% [markdown]
# ## With `jax.lax.while_loop`
#
# Fill the cache, split, carry all that is no `Param`, and write it back. The body returns the state of the
# model that was called: it holds what the call wrote.


# %% tags=["proof"]
@nnx.jit
def decode_with_lax(model, prompts, lengths, eos):
    start = prefill(model, prompts, lengths, eos)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def body(carry):
        rest, *carry = carry
        model = nnx.merge(graphdef, params, rest)
        carry = decode_step(model, *carry, eos)
        return nnx.state(model, nnx.Not(nnx.Param)), *carry

    rest, tokens, position, _ = jax.lax.while_loop(unfinished, body, (rest, *start))
    nnx.update(model, rest)
    return tokens, position + 1


assert compare(decode_with_lax, model, eos=0) == (new, max(map(len, new)))
print("the same tokens, the same number of iterations")

# %% [markdown]
# ## The cache is created in the loop
#
# A Module that makes its cache at its first call gives the carry a leaf that it did not have. Make the cache
# in `__init__`, as long as the longest sequence: [no loop adds a Variable](module_changes_in_a_loop.py), and
# [none grows](carry_dtype_and_shape.py).


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.while_loop requires body function's input and output to have the same reference and pytree structure", "mode": "graph"}, {"error": "ValueError", "match": "different numbers of pytree children at key path", "mode": "tree"}]
class LazyCache(nnx.Module):
    def __call__(self, x):
        if not hasattr(self, "last"):
            self.last = nnx.Cache(jnp.zeros(()))
        self.last[...] = x
        return x + 1


nnx.while_loop(lambda c: c[1] < 3, lambda c: (c[0], c[0](c[1])), (LazyCache(), 0.0))

# %% [markdown]
# ## A prompt is given to `nnx.MultiHeadAttention(decode=True)`
#
# It takes one token at a time, and has one `cache_index` for the whole batch. The attention above takes whole
# prompts, and each row is at a place of its own.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Autoregressive cache shape error, expected"}]
attention = nnx.eval_shape(lambda: nnx.MultiHeadAttention(2, 16, decode=True, rngs=nnx.Rngs(0)))
attention.init_cache((3, MAX_LENGTH, 16))
assert attention.cache_index.shape == ()
nnx.eval_shape(lambda attention, x: attention(x), attention, jnp.zeros((3, 5, 16)))

# %% [markdown]
# ## The bound is traced
#
# With a bound that is known, `fori_loop` is a scan. With a traced one it is a while loop.

# %% tags=["proof"]
for name, loop in ("jax.lax.fori_loop", jax.lax.fori_loop), ("nnx.fori_loop", nnx.fori_loop):
    known = jax.make_jaxpr(lambda n: loop(0, 4, lambda i, x: x + i, n))(4)
    traced = jax.make_jaxpr(lambda n: loop(0, n, lambda i, x: x + i, 0))(4)
    primitives = [jaxpr.eqns[-1].primitive.name for jaxpr in (known, traced)]
    assert primitives == ["scan", "while"]
    print(f"{name:18}", *primitives)

# %% [markdown]
# ## The length of a scan is traced
#
# A scan stacks what the body returns, so its length is a shape. Make it static, use `fori_loop`, or scan to
# the largest length and [mask](#the-gradient-of-a-loop-that-stops-early).

# %% tags=["raises-exception"] raises=[{"error": "ConcretizationTypeError", "match": "The `length` argument to `scan` expects a concrete `int` value"}]
jax.jit(lambda n: jax.lax.scan(lambda x, _: (2 * x, x), 1, length=n))(4)

# %% [markdown]
# ## The bound is a Variable
#
# A Variable is not an array, nor is any object that only has `__jax_array__`
# ([jax-ml/jax#29842](https://github.com/jax-ml/jax/issues/29842)). Pass the array in it, `num_steps[...]`. jax 0.7
# warns before it raises.

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "No constant handler for type", "jax": "<0.8"}, {"error": "ValueError", "match": "Triggering __jax_array__() during abstractification is no longer supported", "jax": ">=0.8"}]
import warnings

num_steps = nnx.Variable(jnp.array(3))
with warnings.catch_warnings(action="ignore"):
    nnx.jit(lambda n: nnx.fori_loop(0, n, lambda i, x: 2 * x, 1))(num_steps)

# %% tags=["proof"]
assert nnx.jit(lambda n: nnx.fori_loop(0, n[...], lambda i, x: 2 * x, 1))(num_steps) == 8
print("num_steps[...] is an array")

# %% [markdown]
# ## Another number of iterations for every example
#
# `nnx.vmap` runs the loop until the last example is done, and keeps the others as they were when they were
# done. In [google/flax#4700](https://github.com/google/flax/issues/4700) it raised because the carried model
# is not mapped. A model with a cache cannot be broadcast like this, since each example fills its own: give a
# decoder the whole batch, as above.


# %% tags=["proof"]
def refine(linear, x, num_steps):
    def body(carry):
        step, linear, x = carry
        return step + 1, linear, jnp.tanh(linear(x))

    return nnx.while_loop(lambda carry: carry[0] < num_steps, body, (0, linear, x))[2]


def refine_in_python(linear, x, num_steps):
    rows = list(x)
    for i, n in enumerate(num_steps):
        for _ in range(n):
            rows[i] = jnp.tanh(linear(rows[i]))
    return jnp.array(rows)


linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
x = np.random.RandomState(0).normal(size=(4, 3)).astype("float32")
num_steps = np.array([0, 3, 1, 5])
refined = nnx.jit(nnx.vmap(refine, in_axes=(None, 0, 0)))(linear, x, num_steps)
assert np.allclose(refined, refine_in_python(linear, x, num_steps), atol=1e-6)
print("equal to a Python loop of", num_steps, "iterations")

# %% [markdown]
# ## The gradient of a loop that stops early
#
# Reverse mode needs to know how many iterations there are at most. A while loop does not say, nor does a
# [`fori_loop` with a traced bound](different_trace_level.py#the-gradient-of-a-loop-whose-bound-is-traced).

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Reverse-mode differentiation does not work for lax.while_loop or lax.fori_loop with dynamic start/stop values"}]
nnx.grad(lambda linear: refine(linear, x, 3).sum())(linear)

# %% [markdown]
# Scan to the largest number of steps, and keep the rows that are done. The gradient is that of the loop cut
# short. All `max_steps` are computed, and a row that wants more is cut off without a word. The body runs on
# finished rows too: where it gives inf or NaN there, hand it a harmless input as well, or the gradient is NaN.


# %% tags=["proof"]
def masked_refine(linear, x, num_steps, max_steps):
    def body(x, step):
        return jnp.where((step < num_steps)[:, None], jnp.tanh(linear(x)), x), None

    return jax.lax.scan(body, x, jnp.arange(max_steps))[0]


def loss_fn(linear, refine, num_steps, *args):
    return jnp.mean(refine(linear, x, num_steps, *args) ** 2)


masked = nnx.jit(lambda linear, n: nnx.grad(loss_fn)(linear, masked_refine, n, 8))(linear, num_steps)
cut_short = nnx.jit(nnx.grad(lambda linear: loss_fn(linear, refine_in_python, num_steps)))(linear)
pairs = list(zip(jax.tree.leaves(masked), jax.tree.leaves(cut_short), strict=True))
assert len(pairs) == 2 and all(np.abs(a).max() > 0.1 for a, _ in pairs)
assert max(np.abs(np.subtract(a, b)).max() for a, b in pairs) < 1e-6
print("kernel and bias: gradients equal those of the Python loop to 1e-06")

# %% [markdown]
# ## What a token costs
#
# Floating-point operations of one call for three rows, as the compiler counts them.

# %% tags=["proof"]
one_token = np.zeros((3, 1), int)
lowered = nnx.jit(lambda model, tokens: model(tokens, one_token)).lower(model, one_token)
cached = int(lowered.cost_analysis()["flops"])
full = int(all_logits.lower(without_cache, np.zeros((3, MAX_LENGTH), int)).cost_analysis()["flops"])
print(f"with the cache {cached:,}, without {full:,}")
assert 0.9 * MAX_LENGTH < full / cached < 1.1 * MAX_LENGTH

# %% [markdown]
# ## When to prefer another recipe
#
# - You write the cache from a closure or a bound method: [a different trace level](different_trace_level.py).
# - You carry other things, such as an optimizer or metrics: [what a loop may
#   touch](what_a_loop_may_touch.py).
# - The number of iterations is known: [a scan](accumulate_with_scan.py).
