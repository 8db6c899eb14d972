"""What a model really attends to, seen below autograd and with none of attnflow's code.

Every operation of a forward pass is seen as torch's lowest level carries it out, fused kernels taken apart into plain
matrix products and softmax. An attention call is a product of the result of a softmax of scores (themselves a product)
with values; what was multiplied is kept as it was. For every tensor it is known which calls it depends on.
"""

import contextlib
import dataclasses

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sweep.build import ran, tensors

aten = torch.ops.aten
DATA = 1  # the bit of what depends on the model's inputs; call number n has the bit 2 << n
PRODUCTS = {aten.bmm: 0, aten.mm: 0, aten.baddbmm: 1, aten.addmm: 1}
SOFTMAX = {aten._softmax, aten._safe_softmax}
# What keeps an entry of a matrix an entry of a matrix, whatever happens to its value.
ENTRYWISE = {
    aten.view, aten._unsafe_view, aten.reshape, aten.expand, aten.transpose, aten.permute, aten.t, aten.clone,
    aten._to_copy, aten.alias, aten.detach, aten.slice, aten.select, aten.unsqueeze, aten.squeeze, aten.cat,
    aten.constant_pad_nd, aten.as_strided, aten.split, aten.split_with_sizes, aten.unbind, aten.unfold, aten.roll,
    aten.add, aten.add_, aten.sub, aten.sub_, aten.mul, aten.mul_, aten.div, aten.div_, aten.neg, aten.where,
    aten.masked_fill, aten.masked_fill_, aten.maximum, aten.minimum, aten.clamp, aten.tanh, aten.nan_to_num,
    aten.copy_, aten.index_put_, aten.bernoulli, aten.native_dropout, aten.repeat, aten.stack, aten.rsub, aten.exp,
    aten.gather, aten.index, aten.scatter, aten.slice_scatter, aten.select_scatter, aten.clamp_min, aten.lerp,
}  # fmt: skip
MOST_CALLS, MOST_NUMBERS = 600, 150e6


class TooMuchError(Exception):
    """More calls, or larger ones, than the judge has room for."""


@dataclasses.dataclass
class Call:
    """One attention call: weights (stack, query, key) that multiplied values (stack, key, feature).

    depends: bits of the calls (and of the data) that its values depend on.
    """

    number: int
    module: str
    weights: torch.Tensor
    values: torch.Tensor
    depends: int


class Spy(TorchDispatchMode):
    """Sees the calls of what runs inside it. silence: the results of calls are replaced by zeros."""

    def __init__(self, silence=False):
        super().__init__()
        self.calls, self.silence, self.where = [], silence, [""]
        self.alive, self.origin, self.scores, self.shares, self.room = [], {}, set(), set(), MOST_NUMBERS
        self.parameters = set()

    def give(self, model, *values):
        """Marks tensors as data, and those of the model as parameters."""
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor):
                self.alive.append(tensor)
                self.origin[tensor.untyped_storage().data_ptr()] = DATA

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        into = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        packet = func.overloadpacket
        result = func(*args, **kwargs)
        out = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        origin = 0
        for tensor in into:
            origin |= self.origin.get(tensor.untyped_storage().data_ptr(), 0)
        call = self.product(packet, args, origin) if packet in PRODUCTS else None
        if call is not None:
            origin |= 2 << call.number
            if self.silence:
                out[0].zero_()
        self.note(packet, into, out, call)
        for tensor in out:
            place = tensor.untyped_storage().data_ptr()
            self.origin[place] = self.origin.get(place, 0) | origin
            self.alive.append(tensor)
        return result

    def note(self, packet, into, out, call):
        """Carries on which tensors hold scores, and which shares of attention."""
        share = any(id(t) in self.shares for t in into)
        score = any(id(t) in self.scores for t in into)
        ids = {id(t) for t in out}
        if packet in SOFTMAX:
            if score:
                self.shares |= ids
        elif packet in PRODUCTS:
            if call is None and share:
                self.shares |= ids  # a linear map over heads
            elif call is None:
                by_data = [bool(self.origin.get(t.untyped_storage().data_ptr(), 0)) for t in into[-2:]]
                if packet in (aten.bmm, aten.baddbmm) or all(by_data) or score:
                    self.scores |= ids
        elif packet is aten.convolution or packet in ENTRYWISE:
            self.shares |= ids if share else set()
            self.scores |= ids if score else set()

    def product(self, packet, args, origin):
        """The call that a product is, if one of its factors is a share of attention."""
        left, right = args[PRODUCTS[packet] :][:2]
        if id(left) in self.shares:
            weights, values = left, right
        elif id(right) in self.shares:
            weights, values = right.mT, left.mT
        else:
            return None
        place = values.untyped_storage().data_ptr()
        if place in self.parameters:
            return None  # heads mixed by a linear map
        depends = self.origin.get(place, 0)
        self.room -= weights.numel() + values.numel()
        if self.room < 0 or len(self.calls) >= MOST_CALLS:
            raise TooMuchError(f"more than {len(self.calls)} calls, the largest {tuple(weights.shape)}")
        weights, values = (t.detach().clone().reshape(-1, *t.shape[-2:]) for t in (weights, values))
        self.calls.append(Call(len(self.calls), self.where[-1], weights, values, depends))
        return self.calls[-1]


@contextlib.contextmanager
def names(model, spy):
    """Lets a spy know in which module it is."""

    def enter(name):
        return lambda *_: spy.where.append(name)

    hooks = [m.register_forward_pre_hook(enter(n)) for n, m in model.named_modules()]
    hooks += [m.register_forward_hook(lambda *_: spy.where.pop() and None, always_call=True) for m in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def watch(model, inputs, silence=False, before=None):
    """The calls of one forward pass, and what the model returned. before: (module, what to do to its input, once)."""
    spy = Spy(silence)
    hooks = [before[0].register_forward_pre_hook(before[1], with_kwargs=True)] if before else []
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with names(model, spy), sdpa_kernel(SDPBackend.MATH), spy:
            spy.give(model, *inputs.values())
            output = ran(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for hook in hooks:
            hook.remove()
    return spy.calls, output


RETURNED = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions", "vision_attentions")


def returned(built):
    """The weights that a twin with eager attention returns of itself: tensors (example, head, query, key)."""
    if built.eager is None:
        return []
    twin = built.eager()
    known = twin.forward.__code__.co_varnames
    asked = {"output_attentions": True} if "output_attentions" in known or "kwargs" in known else {}
    output = ran(twin, {**built.inputs, **asked})
    found = []
    for name in RETURNED:
        found += [t for t in tensors(getattr(output, name, None)) if t.ndim == 4]
    return found
