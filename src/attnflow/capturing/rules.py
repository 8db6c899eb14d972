"""Rules of the backward pass, under which gradient x input adds up to the score.

Between its nonlinear parts a Transformer is linear. A rule replaces, in the backward pass alone, a nonlinear function
by the linear map that has the same value at this input; the gradient at a token times the token is then its share of
the score. `Rules` is a mode of torch that changes the backward of a few functions while a model runs: outputs stay what
they are, and nothing is left on the model. `RULES` is the table of rule sets.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.checkpoint import CheckpointError

from attnflow.capturing.calls import multi_head_mask

RuleSet: TypeAlias = Literal["libra", "attnlrp", "cp-lrp"]


@dataclass(frozen=True)
class Rule:
    """One rule set; norms and activations are linear in all of them.

    weights: of attention (and of any softmax), "own" gradient, or held "constant". bilinear: of a product of two
    tensors that both come from the input, such as weights times values: "own" gradients, or "half" to each factor.
    adds_up: whether relevance and the shares of biases add up to the score exactly.
    """

    weights: Literal["own", "constant"]
    bilinear: Literal["own", "half"]
    source: str
    adds_up: bool = False


RULES: dict[str, Rule] = {
    "libra": Rule("own", "own", "Mehri et al. 2024 (LibraGrad): norms, activations and gates"),
    "attnlrp": Rule("own", "half", "Achtibat et al. 2024"),
    "cp-lrp": Rule("constant", "half", "Ali et al. 2022", adds_up=True),
}

# The set that the method "lrp" stands for: the best by deletion on the tasks of docs/leaderboard.md, or not told apart.
LRP: RuleSet = "attnlrp"


class _As(torch.autograd.Function):
    """A value, in a list, with the gradient of something else."""

    @staticmethod
    def forward(ctx: Any, value: list[torch.Tensor], other: torch.Tensor) -> torch.Tensor:
        return value[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, gradients[0]


class _Scaled(torch.autograd.Function):
    """A value, in a list, with the gradient of x times constant factors."""

    @staticmethod
    def forward(ctx: Any, value: list[torch.Tensor], x: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*factors)
        return value[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0]
        for factor in ctx.saved_tensors:
            gradient = gradient * factor
        return None, gradient, *(None for _ in ctx.saved_tensors)


def _share(x: torch.Tensor, share: float) -> torch.Tensor:
    """The same numbers, which pass on a share of their gradient."""
    return _Scaled.apply([x.detach()], x, torch.tensor(share))  # pyright: ignore[reportReturnType]


def gradients(score: torch.Tensor, wanted: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a score, None of what it does not depend on.

    Raises ValueError for checkpointed blocks under rules: they run again in the backward pass, where no rule holds.
    """
    try:
        return torch.autograd.grad(score, wanted, allow_unused=True)
    except CheckpointError:
        raise ValueError(
            "gradient checkpointing runs blocks again without the rules: switch it off (gradient_checkpointing_disable)"
        ) from None


class Rules(TorchFunctionMode):
    """Runs a model under a rule set: `with Rules("cp-lrp").of(model) as rules: output = model(...)`.

    constants: what was added to the stream and comes from no input, as leaves whose gradients tell its share: biases,
    learned positions and tokens. by_token: of what is added to rows of numbers the leaves are factors of 1, one for
    each row, so that the share of a bias is known token by token. without_rule: names of functions of the input that
    are neither linear nor in a rule.

    Parameters take no part in gradients here, so that a tensor needs a gradient just where it comes from the input.
    `scores` computes a target, whose softmax is no attention: it keeps its own gradient.
    """

    def __init__(self, name: str, *, by_token: bool = False) -> None:
        super().__init__()
        if name not in RULES:
            raise ValueError(f"rules {name!r} are unknown; choose one of {', '.join(RULES)}")
        self.rule = RULES[name]
        self.by_token = by_token
        self.constants: list[torch.Tensor] = []
        self.without_rule: set[str] = set()
        self._of_target = False
        self._inputs: dict[int, tuple[torch.Tensor, torch.Tensor, bool]] = {}
        self._thread = threading.get_ident()  # another thread may run the same model, under no rules or its own

    @contextmanager
    def of(self, model: torch.nn.Module) -> Generator[Rules]:
        """The mode, entered, with activations that are modules of their own seen as one function each."""
        hooks: list[Any] = []
        for module in model.modules():
            if isinstance(module, _LINEAR_MODULES):
                continue
            if not any(True for _ in module.children()) and not any(True for _ in module.parameters()):
                hooks.append(module.register_forward_pre_hook(self._enter))
                hooks.append(module.register_forward_hook(self._leave))
        try:
            with self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...]) -> Any:
        if threading.get_ident() != self._thread or len(args) != 1 or not _live(_free(args[0])):
            return None
        elementwise, in_place = _tried(module, args[0])
        if not elementwise:
            return None
        inside = args[0].detach().clone() if in_place else args[0].detach()
        self._inputs[id(module)] = args[0], inside, in_place
        return (inside,)

    def _leave(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if threading.get_ident() != self._thread:
            return None
        x, inside, in_place = self._inputs.pop(id(module), (None, None, False))
        if x is None or args[0] is not inside:
            return None
        with torch._C.DisableTorchFunction():  # pyright: ignore
            result = _through(x, output.detach(), module.forward)
            return _written(x, result) if in_place else result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("__get__", "__set__"):
            return func(*map(_free, args)) if func in _TRANSPOSED else func(*args, **kwargs)
        args, kwargs = _mapped(_free, args), {name: _mapped(_free, value) for name, value in kwargs.items()}
        if not any(map(_live, _tensors((args, kwargs)))):
            return func(*args, **kwargs)
        rule = _RULES.get(func)
        if rule is not None:
            return rule(self, func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name not in _LINEAR:
            self.without_rule.add(resolve_name(func) or name)
        return func(*args, **kwargs)

    def scores(self, target: Callable[[Any], torch.Tensor], output: Any) -> torch.Tensor:
        """What a target makes of the model's output, inside the mode."""
        self._of_target = True
        try:
            return target(output)
        finally:
            self._of_target = False

    def weights(self, softmax: torch.Tensor) -> torch.Tensor:
        """The result of a softmax as the rule set has it."""
        if self.rule.weights == "own":
            return softmax
        if self._of_target:
            self.without_rule.add("softmax of the target")
            return softmax
        return softmax.detach()

    def constant(self, x: Any, shape: Sequence[int] = ()) -> Any:
        """A tensor, or a number, that comes from no input, as a leaf that is kept; shape: of what it is added to."""
        if isinstance(x, torch.Tensor) and (not x.is_floating_point() or x.requires_grad):
            return x
        value = x.detach() if isinstance(x, torch.Tensor) else torch.tensor(float(x))
        if self.by_token and shape:
            rows = torch.ones(*shape[:-1], 1, dtype=value.dtype, device=value.device).requires_grad_()
            self.constants.append(rows)
            return value * rows
        leaf = value.requires_grad_()
        self.constants.append(leaf)
        return leaf

    def with_bias(self, linear: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """What a linear map gives and the bias that is added to it, which is kept."""
        return linear if bias is None else linear + self.constant(bias, linear.shape)


def _live(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _free(x: Any) -> Any:
    """A parameter cut loose from gradients."""
    return x.detach() if _live(x) and isinstance(x, torch.nn.Parameter) else x


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_mapped(change, one) for one in value)
    return change(value)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)


def _tried(module: torch.nn.Module, x: torch.Tensor) -> tuple[bool, bool]:
    """Whether a module without parameters maps each number by itself and all alike, and whether it writes in its input.

    Tried on a corner of the input: with every other number changed, along all axes, the others must stay what they are;
    and a number that stands everywhere must become the same everywhere.
    """
    with torch.no_grad(), torch._C.DisableTorchFunction():  # pyright: ignore
        few = x.detach()[tuple(slice(0, 8 if axis == x.ndim - 1 else 3) for axis in range(x.ndim))].clone()
        places = sum(torch.arange(size, device=x.device).view(-1, *(1,) * (x.ndim - 1 - axis)) for axis, size in
                     enumerate(few.shape))  # fmt: skip
        even = torch.as_tensor(places % 2 == 0).expand(few.shape)
        given = [few.clone(), torch.where(even, few, few + 1), torch.full_like(few, 0.5)]
        before = [one.clone() for one in given]
        try:
            found = [module.forward(one) for one in given]
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False, False
        if not all(isinstance(one, torch.Tensor) and one.shape == few.shape for one in found):
            return False, False
        one, two, alike = found
        by_itself = bool((one[even] == two[even]).all()) and bool((alike == alike.flatten()[0]).all())
        return by_itself, not all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


def _written(x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The result written into x, as a function that works in place does; a leaf cannot be written to."""
    return result if x.is_leaf else x.copy_(result)


def _through(x: torch.Tensor, value: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The value f(x) with the gradient of x * c, c = f(x) / x a constant; where x is 0, the slope of f there."""
    with torch.no_grad():
        factor = value / x
        nothing = x == 0
        if bool(nothing.any()):
            factor = torch.where(nothing, _slope_at_0(x, function), factor)
    return _Scaled.apply([value], x, factor)  # pyright: ignore[reportReturnType]


def _slope_at_0(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    with torch.enable_grad():
        zero = x.new_zeros(1).requires_grad_()
        value = function(zero * 1)
        slope = torch.autograd.grad(value.sum(), zero, allow_unused=True)[0] if value.requires_grad else None
    return x.new_zeros(()) if slope is None else slope[0].nan_to_num(0, 0, 0)


def _activation(rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    in_place, func = func in _IN_PLACE, _IN_PLACE.get(func, func)
    if inspect.isfunction(func):  # of torch.nn.functional, of which some take inplace=
        kwargs = dict(inspect.signature(func).bind(*args, **kwargs).arguments)
        x, rest, in_place = kwargs.pop("input"), (), kwargs.pop("inplace", False) or in_place
    else:
        kwargs = dict(kwargs)
        x, *rest = args if args else (kwargs.pop("input"),)
    function = partial(_applied, func, rest, kwargs)
    with torch.no_grad():
        value = function(x)
    result = _through(x, value, function)
    return _written(x, result) if in_place else result


def _applied(func: Any, rest: Any, kwargs: Any, x: torch.Tensor) -> torch.Tensor:
    return func(x, *rest, **kwargs)


def _as_constant(rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    """What a norm divides by."""
    output = func(*args, **kwargs)
    return _mapped(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, output)


def _layer_norm(rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, shape, weight, bias = (given.get(name) for name in names[:4])
    eps = given.get("eps", 1e-5)
    assert isinstance(x, torch.Tensor)
    assert shape is not None
    axes = tuple(range(-len(shape), 0))
    with torch.no_grad():
        value = func(*args, **kwargs)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = (wide.var(axes, unbiased=False, keepdim=True) + eps).rsqrt().to(x.dtype)
    linear = (x - x.mean(axes, keepdim=True)) * scale
    linear = linear if weight is None else linear * weight
    return _As.apply([value], rules.with_bias(linear, bias))


def _rms_norm(rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "normalized_shape", "weight", "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, shape, weight, eps = (given.get(name) for name in names)
    assert isinstance(x, torch.Tensor)
    assert shape is not None
    with torch.no_grad():
        value = func(*args, **kwargs)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        eps = torch.finfo(wide.dtype).eps if eps is None else eps
        scale = (wide.square().mean(tuple(range(-len(shape), 0)), keepdim=True) + eps).rsqrt().to(x.dtype)
    return _Scaled.apply([value], x, scale, *(() if weight is None else (weight,)))


def _group_norm(rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "num_groups", "weight", "bias", "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, groups, weight, bias = (given.get(name) for name in names[:4])
    assert isinstance(x, torch.Tensor)
    assert isinstance(groups, int)
    with torch.no_grad():
        value = func(*args, **kwargs)
    grouped = x.unflatten(1, (groups, -1)).flatten(2)
    scale = (grouped.detach().var(2, unbiased=False, keepdim=True) + given.get("eps", 1e-5)).rsqrt()
    linear = ((grouped - grouped.mean(2, keepdim=True)) * scale).view_as(x)
    channels = (1, -1, *(1,) * (x.ndim - 2))
    linear = linear if weight is None else linear * weight.view(channels)
    return _As.apply([value], linear if bias is None else linear + rules.constant(bias).view(channels))


def _affine(place: int, name: str, rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    """A linear map with a bias, which is kept."""
    if name in kwargs and kwargs[name] is not None:
        kwargs = {**kwargs, name: rules.constant(kwargs[name])}
    elif len(args) > place and args[place] is not None:
        args = (*args[:place], rules.constant(args[place]), *args[place + 1 :])
    return func(*args, **kwargs)


def _linear(rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    if not rules.by_token:
        return _affine(2, "bias", rules, func, args, kwargs)
    given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
    return rules.with_bias(func(given["input"], given["weight"]), given.get("bias"))


def _addmm(rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    if not rules.by_token or len(args) != 3 or kwargs:
        return _affine(0, "input", rules, func, args, kwargs)
    bias, one, two = args
    return rules.with_bias(one @ two, bias)


def _batch_norm(rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    """In evaluation an affine map of each channel."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, mean, var = (given[name] for name in names[:3])
    shape = (1, -1, *(1,) * (x.ndim - 2))
    scale = (var + given.get("eps", 1e-5)).rsqrt()
    scale = scale if given.get("weight") is None else scale * given["weight"]
    shift = -mean * scale if given.get("bias") is None else given["bias"] - mean * scale
    with torch.no_grad():
        value = func(*args, **kwargs)
    return _As.apply([value], x * scale.view(shape) + rules.constant(shift).view(shape))


def _joined(rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    """An addition, or a concatenation, in which what comes from no input is kept."""
    shape: Sequence[int] = ()
    if rules.by_token and func in _SUMS:
        shape = torch.broadcast_shapes(*(x.shape for x in _tensors((args[:2], kwargs.get("other")))))

    def keep(x: Any) -> Any:
        number = isinstance(x, float | int) and not isinstance(x, bool) and func in _SUMS
        return rules.constant(x, shape) if (isinstance(x, torch.Tensor) and not x.requires_grad) or number else x

    own = {name: value for name, value in kwargs.items() if name in ("alpha", "dim", "out")}
    rest = {name: _mapped(keep, value) for name, value in kwargs.items() if name not in own}
    if func in _SUMS:
        return func(*(keep(x) for x in args[:2]), *args[2:], **rest, **own)
    return func(_mapped(keep, args[0]), *args[1:], **rest, **own)


def _product(rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    """Of two tensors from the input half of the gradient to each: gates in every set, other products as it says."""
    one, two = args[0], args[1] if len(args) > 1 else kwargs.get("other")
    if not (_live(one) and _live(two)):
        return func(*args, **kwargs)
    in_place = func in _IN_PLACE
    result = _halves(func, (one.clone() if in_place else one, two), args[2:], kwargs)
    return _written(one, result) if in_place else result


def _bilinear(rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    factors = args[1:3] if func in _ADDED_TO else args[:2]
    if rules.rule.bilinear == "own" or len(factors) < 2 or not all(map(_live, factors)):
        return func(*args, **kwargs)
    if func in _ADDED_TO:
        return func(args[0], *(_share(x, 0.5) for x in factors), *args[3:], **kwargs)
    return _halves(func, factors, args[2:], kwargs)


def _halves(func: Any, factors: Any, rest: Any, kwargs: Any) -> Any:
    kwargs = {name: value for name, value in kwargs.items() if name != "other"}
    return _IN_PLACE.get(func, func)(*(_share(x, 0.5) for x in factors), *rest, **kwargs)


def _einsum(rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    equation, *operands = args
    operands = operands[0] if len(operands) == 1 and isinstance(operands[0], tuple | list) else operands
    if rules.rule.bilinear == "own" or sum(map(_live, operands)) < 2 or len(operands) != 2:
        return func(*args, **kwargs)
    return _halves(partial(func, equation), operands, (), {})


def _divided(rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    """What is divided by is a constant."""
    one, two = args[0], args[1] if len(args) > 1 else kwargs.get("other")
    if not _live(two):
        return func(*args, **kwargs)
    return func(one, two.detach(), *args[2:], **{k: v for k, v in kwargs.items() if k != "other"})


def _normalize(rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    """A vector divided by its length, which is a constant."""
    given = dict(inspect.signature(F.normalize).bind(*args, **kwargs).arguments)
    return _unit(given["input"], given.get("p", 2.0), given.get("dim", 1), given.get("eps", 1e-12))


def _cosine(rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    """The product of two vectors divided by their lengths, which are constants."""
    with torch.no_grad():
        value = func(*args, **kwargs)
    given = dict(zip(("x1", "x2", "dim", "eps"), args, strict=False)) | kwargs
    dim, eps = given.get("dim", 1), given.get("eps", 1e-8)
    units = tuple(_unit(given[name], 2.0, dim, eps) for name in ("x1", "x2"))
    return _As.apply([value], _product(rules, torch.mul, units, {}).sum(dim))


def _unit(x: torch.Tensor, p: float, dim: int, eps: float) -> torch.Tensor:
    return x / torch.linalg.vector_norm(x.detach(), p, dim, keepdim=True).clamp_min(eps)


def _softmax(rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    return rules.weights(func(*args, **kwargs))


def _attention(rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("query", "key", "value")
    q, k, v = (kwargs[name] if name in kwargs else args[place] for place, name in enumerate(names))
    rest, named = args[3:], {name: value for name, value in kwargs.items() if name not in names}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return func(q, k, v, *rest, **named)

    if rules.rule.weights == "constant":
        return attend(q.detach(), k.detach(), v)
    if rules.rule.bilinear == "own":
        return attend(q, k, v)
    return attend(_share(q, 0.25), _share(k, 0.25), _share(v, 0.5))  # half to the weights, of which half to each factor


def _multi_head(rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    """nn.MultiheadAttention: projections, attention under its rule, and the projection of what it gives."""
    given = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    given.apply_defaults()
    own = given.arguments
    with torch.no_grad():
        value, weights = func(*args, **kwargs)
    tokens = [own[name] if own[name].ndim == 3 else own[name][:, None] for name in ("query", "key", "value")]
    if own["use_separate_proj_weight"]:
        matrices = [own[f"{name}_proj_weight"] for name in "qkv"]
    else:
        matrices = own["in_proj_weight"].chunk(3)
    biases = [None] * 3 if own["in_proj_bias"] is None else own["in_proj_bias"].chunk(3)
    q, k, v = (
        rules.with_bias(F.linear(x, matrix), bias).unflatten(-1, (own["num_heads"], -1)).permute(1, 2, 0, 3)
        for x, matrix, bias in zip(tokens, matrices, biases, strict=True)
    )
    mask = multi_head_mask(own["attn_mask"], own["key_padding_mask"], batch=q.shape[0], heads=q.shape[1])
    attended = _attention(rules, F.scaled_dot_product_attention, (q, k, v, mask), {}).permute(2, 0, 1, 3).flatten(2)
    bias = own["out_proj_bias"]
    linear = rules.with_bias(F.linear(attended, own["out_proj_weight"]), bias)
    return _As.apply([value], linear.reshape(value.shape)), weights


def _glu(rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    x, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", -1)
    one, two = x.chunk(2, dim)
    with torch.no_grad():
        value, gate = func(*args, **kwargs), two.sigmoid()
    return _As.apply([value], _halves(torch.mul, (one, _through(two, gate, torch.sigmoid)), (), {}))


def _power(rules: Rules, func: Any, args: Any, kwargs: Any) -> Any:
    exponent = args[1] if len(args) > 1 else kwargs.get("exponent", 2)
    if isinstance(exponent, torch.Tensor) or not _live(args[0]):
        return _activation(rules, func, args, kwargs)
    if exponent < 0 or exponent == 0.5:  # what a norm multiplies by
        return func(*args, **kwargs).detach()
    return _activation(rules, func, args, kwargs)


_TRANSPOSED = {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}
_IN_PLACE: dict[Any, Any] = {
    torch.Tensor.mul_: torch.mul,
    torch.Tensor.__imul__: torch.mul,
    torch.relu_: torch.relu,
    torch.Tensor.relu_: torch.relu,
    torch.Tensor.sigmoid_: torch.sigmoid,
    torch.Tensor.tanh_: torch.tanh,
    torch.Tensor.exp_: torch.exp,
    torch.Tensor.clamp_: torch.clamp,
    torch.Tensor.square_: torch.square,
}
_SUMS = {
    torch.add, torch.sub, torch.rsub, torch.Tensor.add, torch.Tensor.sub, torch.Tensor.__add__, torch.Tensor.__radd__,
    torch.Tensor.__sub__, torch.Tensor.__rsub__, torch.Tensor.add_, torch.Tensor.__iadd__, torch.Tensor.sub_,
    torch.Tensor.__isub__,
}  # fmt: skip
_ADDED_TO = {torch.baddbmm, torch.Tensor.baddbmm}
_PRODUCTS = {
    torch.mul,
    torch.Tensor.mul,
    torch.Tensor.__mul__,
    torch.Tensor.__rmul__,
    torch.Tensor.mul_,
    torch.multiply,
}
_MATRICES = {torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm, torch.mm}
_ACTIVATIONS = {
    F.gelu, F.silu, F.relu, F.tanh, F.sigmoid, F.hardswish, F.mish, F.elu, F.selu, F.celu, F.leaky_relu, F.softplus,
    F.relu6, F.hardtanh, F.hardsigmoid, F.logsigmoid, F.softsign, F.tanhshrink, torch.relu, torch.tanh, torch.sigmoid,
    torch.Tensor.relu, torch.Tensor.tanh, torch.Tensor.sigmoid, torch.erf, torch.Tensor.erf, torch.exp,
    torch.Tensor.exp, torch.clamp, torch.Tensor.clamp, torch.square, torch.Tensor.square, torch.log, torch.Tensor.log,
    torch.abs, torch.Tensor.abs, torch.sin, torch.cos, torch.Tensor.sin, torch.Tensor.cos, torch.Tensor.clamp_min,
    torch.clamp_min, torch.Tensor.relu_, torch.Tensor.tanh_, torch.Tensor.sigmoid_, torch.relu_, torch.Tensor.exp_,
    torch.Tensor.clamp_, torch.Tensor.square_,
}  # fmt: skip
_DIVISORS = {
    torch.rsqrt, torch.Tensor.rsqrt, torch.sqrt, torch.Tensor.sqrt, torch.std, torch.Tensor.std, torch.var,
    torch.Tensor.var, torch.reciprocal, torch.Tensor.reciprocal, torch.std_mean, torch.var_mean,
}  # fmt: skip
_SOFTMAXES = {F.softmax, torch.softmax, torch.Tensor.softmax}
_DIVISIONS = {torch.div, torch.Tensor.div, torch.Tensor.__truediv__, torch.true_divide, torch.Tensor.div_}

_RULES: dict[Any, Callable[[Rules, Any, Any, Any], Any]] = {
    **dict.fromkeys(_ACTIVATIONS, _activation),
    **dict.fromkeys(_DIVISORS, _as_constant),
    **dict.fromkeys(_SUMS, _joined),
    **dict.fromkeys((torch.cat, torch.stack, torch.hstack, torch.concat), _joined),
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(_MATRICES, _bilinear),
    **dict.fromkeys(_ADDED_TO, _bilinear),
    **dict.fromkeys(_SOFTMAXES, _softmax),
    **dict.fromkeys(_DIVISIONS, _divided),
    F.normalize: _normalize,
    F.cosine_similarity: _cosine,
    torch.cosine_similarity: _cosine,
    **dict.fromkeys((torch.pow, torch.Tensor.pow, torch.Tensor.__pow__), _power),
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
    F.group_norm: _group_norm,
    F.linear: _linear,
    **dict.fromkeys(
        (F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d), partial(_affine, 2, "bias")
    ),
    torch.addmm: _addmm,
    torch.Tensor.addmm: _addmm,
    torch.einsum: _einsum,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head,
    F.glu: _glu,
    **({F.rms_norm: _rms_norm} if hasattr(F, "rms_norm") else {}),
}
# Modules whose function has its own gradient already, and need not be tried: that costs more than they do.
_LINEAR_MODULES = (torch.nn.Dropout, torch.nn.Identity)
# Names of functions that are linear, choose among numbers, or ask about a tensor; and of norms, which add up with their
# own gradient: |x| is x times x / |x|.
_LINEAR = frozenset(
    """
    view reshape transpose permute contiguous flatten unflatten squeeze unsqueeze expand expand_as repeat chunk split
    unbind __getitem__ select narrow index_select gather mean sum cumsum dropout alpha_dropout dropout1d dropout2d
    dropout_ to float half bfloat16 double type type_as clone movedim swapaxes swapdims t mT flip roll pad masked_fill
    masked_fill_ masked_select where repeat_interleave neg __neg__ triu tril diagonal avg_pool1d avg_pool2d
    adaptive_avg_pool1d adaptive_avg_pool2d interpolate unfold fold as_strided view_as reshape_as size dim numel stride
    __len__ is_floating_point is_contiguous tensor_split split_with_sizes tile detach requires_grad_ register_hook numpy
    tolist item is_complex max_pool2d scatter scatter_ index_add index_add_ index_put index_put_ index_copy
    take_along_dim sum_to_size hsplit vsplit broadcast_to empty_like zeros_like ones_like new_zeros new_empty new_ones
    argmax topk sort max amax eq ne lt gt le ge __eq__ __ne__ __lt__ __gt__ __le__ __ge__ isnan isinf any all
    __setitem__ copy_ cpu cuda real pixel_shuffle pixel_unshuffle embedding get_device element_size nelement data_ptr
    norm linalg_norm linalg_vector_norm untyped_storage is_inference is_nonzero __bool__ __hash__ __repr__ __format__
    """.split()  # noqa: SIM905
)
