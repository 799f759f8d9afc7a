"""The variants that are compared: of one training step over N minibatches, of one call, and of one epoch.

All do the same work: same model, same batch, Adam, and gradients that are the mean over the batch. Nothing is donated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

DECAY = 0.9
TX = optax.adam(1e-3, b1=DECAY)
HEADS = 4


class Problem(NamedTuple):
    """A model, as a list of layers and a function of them, and a batch of inputs and labels of shape (rows, ...)."""

    about: str
    forward: Callable[[Any, jax.Array], jax.Array]
    layers: Callable[[nnx.Rngs], list]
    batch: tuple[jax.Array, jax.Array]

    def loss(self, layers, batch) -> jax.Array:
        """Mean cross entropy. `layers` are NNX modules, or dicts of arrays for the hand-written variant."""
        logits = self.forward(layers, batch[0])
        return optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch[1], logits.shape[-1])).mean()


class Step(NamedTuple):
    """One variant, made for one problem: `call(batch)` does one step in place and returns a loss that is ready with it.

    `lower(batch)` lowers the programs that it calls. `opt_state()` is the state of its Adam.
    """

    call: Callable[[Any], jax.Array]
    lower: Callable[[Any], list]
    opt_state: Callable[[], Any]
    batch: Any

    def gradients(self) -> list[jax.Array]:
        """The gradients of the first step, after it: Adam's first moment began with zeros."""
        moment = optax.tree_utils.tree_get(self.opt_state(), "mu")
        return [leaf / (1 - DECAY) for leaf in jax.tree.leaves(moment)]


def mlp(widths: tuple[int, ...], rows: int) -> Problem:
    """An MLP with these widths, of input and output too, and `rows` random rows to classify."""

    def forward(layers, x):
        *inner, last = layers
        for layer in inner:
            x = jax.nn.relu(_apply(layer, x))
        return _apply(last, x)

    def layers(rngs):
        return [nnx.Linear(a, b, rngs=rngs) for a, b in zip(widths[:-1], widths[1:], strict=True)]

    key_x, key_y = jax.random.split(jax.random.key(1))
    batch = jax.random.normal(key_x, (rows, widths[0])), jax.random.randint(key_y, rows, 0, widths[-1])
    about = f"{len(widths) - 1} layers, widths {', '.join(map(str, widths))}; a batch of {rows} rows"
    return Problem(about, forward, layers, batch)


def transformer(depth: int, width: int, vocabulary: int, rows: int, length: int) -> Problem:
    """A causal transformer that predicts the next token, and `rows` rows of `length` random tokens."""

    def forward(layers, tokens):
        embed, *inner, last = layers
        x = _apply(embed, tokens)
        for norm_1, qkv, out, norm_2, up, down in zip(*[iter(inner)] * 6, strict=True):
            q, k, v = jnp.split(_apply(qkv, _apply(norm_1, x)).reshape(*tokens.shape, HEADS, -1), 3, axis=-1)
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + _apply(out, mixed.reshape(*tokens.shape, -1))
            x = x + _apply(down, jax.nn.gelu(_apply(up, _apply(norm_2, x))))
        return _apply(last, x)

    def layers(rngs):
        made = [nnx.Embed(vocabulary, width, rngs=rngs)]
        for _ in range(depth):
            for widths in ((), (1, 3), (1, 1), (), (1, 4), (4, 1)):
                linear = widths and nnx.Linear(widths[0] * width, widths[1] * width, rngs=rngs)
                made.append(linear or nnx.RMSNorm(width, rngs=rngs))
        return [*made, nnx.Linear(width, vocabulary, rngs=rngs)]

    tokens = jax.random.randint(jax.random.key(1), (rows, length), 0, vocabulary)
    about = f"{depth} blocks of width {width}, {HEADS} heads, vocabulary {vocabulary}; a batch of {rows} rows of {length} tokens"
    return Problem(about, forward, layers, (tokens, jnp.roll(tokens, -1, axis=1)))


def _apply(layer, x):
    """A layer of NNX, or the same by hand from its arrays."""
    if isinstance(layer, nnx.Module):
        return layer(x)
    if "embedding" in layer:
        return layer["embedding"][x]
    if "scale" in layer:
        return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * layer["scale"]
    return x @ layer["kernel"] + layer["bias"]


def session(problem: Problem, tx=TX) -> tuple[nnx.List, nnx.Optimizer]:
    """A new model and its optimizer."""
    model = nnx.List(problem.layers(nnx.Rngs(0)))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def cut(batch, n):
    """Arrays of shape (rows, ...) as (n, rows / n, ...)."""
    return jax.tree.map(lambda a: a.reshape(n, -1, *a.shape[1:]), batch)


def cut_list(batch, n: int) -> list:
    """A batch as a list of n minibatches."""
    arrays = cut(batch, n)
    return [jax.tree.map(lambda a, i=i: a[i], arrays) for i in range(n)]


def _zeros(params):
    return jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)


def _add(total, found):
    return jax.tree.map(jnp.add, total, found)


def _divide(total, n):
    return jax.tree.map(lambda a: a / n, total)


def _split(loss_fn, model):
    """The parameters, and the loss as a function of them and a minibatch."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return params, lambda params, batch: loss_fn(nnx.merge(graphdef, params, rest, copy=True), batch)


# Each returns the mean loss and the mean gradients over n minibatches, inside of `nnx.jit`.


def full_batch(loss_fn, model, batch, n):
    return nnx.value_and_grad(loss_fn)(model, batch)


def unrolled(loss_fn, model, batch, n):
    found = [nnx.value_and_grad(loss_fn)(model, minibatch) for minibatch in cut_list(batch, n)]
    return _divide(functools.reduce(_add, found), n)


def nnx_scan(loss_fn, model, batch, n):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def body(carry, minibatch):
        model, total = carry
        return model, _add(total, nnx.value_and_grad(loss_fn)(model, minibatch))

    return _divide(body((model, _zeros(nnx.state(model, nnx.Param))), cut(batch, n))[1], n)


def nnx_fori_loop(loss_fn, model, batch, n):
    minibatches = cut(batch, n)

    def body(i, carry):
        model, total = carry
        minibatch = jax.tree.map(lambda a: a[i], minibatches)
        return model, _add(total, nnx.value_and_grad(loss_fn)(model, minibatch))

    return _divide(nnx.fori_loop(0, n, body, (model, _zeros(nnx.state(model, nnx.Param))))[1], n)


def scan_pure(loss_fn, params, batch, n):
    """The loop of split/merge and of the hand-written variant: JAX sees arrays only."""

    def body(total, minibatch):
        return _add(total, jax.value_and_grad(loss_fn)(params, minibatch)), None

    return _divide(jax.lax.scan(body, _zeros(params), cut(batch, n))[0], n)


def split_merge(loss_fn, model, batch, n):
    params, pure = _split(loss_fn, model)
    return scan_pure(pure, params, batch, n)


def gradient_refs(loss_fn, model, batch, n):
    params, pure = _split(loss_fn, model)
    refs = jax.tree.map(lambda p: jax.new_ref(jnp.zeros_like(p)), params)

    def body(loss_sum, minibatch):
        loss, backward = jax.vjp(lambda p: pure(p, minibatch), params)
        backward.with_refs(refs)(jnp.ones_like(loss))  # adds to the refs
        return loss_sum + loss, None

    loss_sum, _ = jax.lax.scan(body, jnp.zeros(()), cut(batch, n))
    return _divide((loss_sum, jax.tree.map(jax.freeze, refs)), n)


def microbatching(loss_fn, model, batch, n):
    params, pure = _split(loss_fn, model)
    kind = optax.microbatching.AccumulationType.MEAN
    return optax.microbatching.microbatch(jax.value_and_grad(pure), 1, len(batch[1]) // n, kind)(
        params, batch
    )


# Each takes a problem and n and makes a Step.


def _train(problem: Problem, n: int, accumulate=full_batch):
    def step(model, optimizer, batch):
        loss, grads = accumulate(problem.loss, model, batch, n)
        optimizer.update(model, grads)
        return loss

    return step


def _in_nnx_jit(accumulate, problem: Problem, n: int) -> Step:
    model, optimizer = session(problem)
    step = nnx.jit(_train(problem, n, accumulate))
    call = functools.partial(step, model, optimizer)
    return Step(call, lambda b: [step.lower(model, optimizer, b)], lambda: optimizer.opt_state, problem.batch)


def multi_steps(problem: Problem, n: int) -> Step:
    model, optimizer = session(problem, optax.MultiSteps(TX, every_k_schedule=n))
    step = nnx.jit(_train(problem, n))

    def call(minibatches):
        return [step(model, optimizer, minibatch) for minibatch in minibatches][-1]

    def lower(minibatches):
        return [step.lower(model, optimizer, minibatches[0])]

    return Step(call, lower, lambda: optimizer.opt_state, cut_list(problem.batch, n))


def eager_loop(problem: Problem, n: int) -> Step:
    model, optimizer = session(problem)
    grad = nnx.jit(nnx.value_and_grad(problem.loss))
    update = nnx.jit(_train(problem, n, lambda loss_fn, model, total, n: _divide(total, n)))

    def call(minibatches):
        found = (grad(model, minibatch) for minibatch in minibatches)
        return update(model, optimizer, functools.reduce(_add, found))

    def lower(minibatches):
        total = _zeros(nnx.state(model, nnx.Param))
        return [grad.lower(model, minibatches[0]), update.lower(model, optimizer, total)]

    return Step(call, lower, lambda: optimizer.opt_state, cut_list(problem.batch, n))


def hand_written(problem: Problem, n: int) -> Step:
    arrays = [nnx.to_pure_dict(nnx.state(layer)) for layer in session(problem)[0]]
    state = [arrays, TX.init(arrays)]

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = scan_pure(problem.loss, params, batch, n)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def call(batch):
        *state[:], loss = step(*state, batch)
        return loss

    return Step(call, lambda batch: [step.lower(*state, batch)], lambda: state[1], problem.batch)


IN_NNX_JIT = {
    "full batch": full_batch,
    "unrolled": unrolled,
    "nnx.scan": nnx_scan,
    "nnx.fori_loop": nnx_fori_loop,
    "split/merge, jax.lax.scan": split_merge,
    "gradient refs": gradient_refs,
    "optax.microbatching": microbatching,
}
STEPS = {name: functools.partial(_in_nnx_jit, accumulate) for name, accumulate in IN_NNX_JIT.items()}
STEPS |= {"optax.MultiSteps": multi_steps, "eager loop": eager_loop, "hand-written JAX": hand_written}
if not hasattr(jax, "new_ref"):
    del STEPS["gradient refs"]
if not hasattr(optax, "microbatching"):
    del STEPS["optax.microbatching"]


# Each takes a problem and returns a function of a batch: one way to call the same full-batch step.


def _on_state(problem: Problem, transform):
    """A function of what `transform(step)` takes, where `step(state, batch)` works on arrays only."""
    graphdef, state = nnx.split(session(problem))

    def step(state, batch):
        model, optimizer = nnx.merge(graphdef, state, copy=True)
        loss = _train(problem, 1)(model, optimizer, batch)
        return nnx.state((model, optimizer)), loss

    program = jax.jit(transform(step))

    def call(batch):
        nonlocal state
        state, loss = program(state, batch)
        return loss

    return call


CALLS = {
    "nnx.jit": lambda problem: functools.partial(nnx.jit(_train(problem, 1)), *session(problem)),
    "nnx.cached_partial": lambda problem: nnx.cached_partial(nnx.jit(_train(problem, 1)), *session(problem)),
    "nnx.jit_partial": lambda problem: nnx.jit_partial(_train(problem, 1), *session(problem), graph=False),
    "jax.jit on split state": lambda problem: _on_state(problem, lambda step: step),
    "hand-written JAX": lambda problem: hand_written(problem, 1).call,
}
if not hasattr(nnx, "jit_partial"):
    del CALLS["nnx.jit_partial"]


def compiled_epoch(problem: Problem):
    """A function of batches of shape (steps, rows, ...): an epoch in one program. Returns its losses, shape (steps,)."""
    return _on_state(problem, lambda step: lambda state, batches: jax.lax.scan(step, state, batches))
