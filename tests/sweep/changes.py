"""Small changes of what a model is given: one token, one patch, a moment of sound, a position of a state inside it."""

import random
from functools import partial

import numpy as np
import torch

from sweep.build import ran


class Change:
    """One change of the inputs: which example, which position of its trace, and the inputs after it.

    strict: it stands at that position alone. sure: it stands at that position, if perhaps not alone.
    """

    def __init__(self, example, position, inputs, what, strict, sure=True):
        self.example, self.position, self.inputs = example, position, inputs
        self.what, self.strict, self.sure = what, strict, sure
        self.module, self.at, self.patches = None, position, False

    def before(self):
        """For a change of a state inside the model: the module and the hook that changes its input once."""
        if self.module is None:
            return None
        waiting = [True]

        def hook(module, args, kwargs):
            if not waiting:
                return None
            waiting.pop()
            args, kwargs = list(args), dict(kwargs)
            place, key = (args, 0) if args else (kwargs, "hidden_states")
            state = place[key].clone()
            random = torch.Generator().manual_seed(self.at)
            state[self.example, self.at] += torch.randn(state.shape[2], generator=random)
            place[key] = state
            return tuple(args), kwargs

        return self.module, hook


def special_ids(model):
    """Ids in the configuration, which stand for more than words."""
    found, waiting = set(), [getattr(model, "config", None)]
    while waiting:
        config = waiting.pop()
        for name, value in vars(config).items() if config is not None else ():
            if hasattr(value, "to_dict"):
                waiting.append(value)
            if name.endswith(("_id", "_ids", "_index", "_token")):
                found |= {v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)}
    return found


def changes(built, calls, traces, count, seed=0):
    """A few changes, chosen by the seed, of tokens, patches, sounds, and states before the first layer."""
    every, special = [], special_ids(built.model)
    for example, trace in enumerate(traces):
        every += [c for name in ("input_ids", "decoder_input_ids") for c in words(built, trace, example, name, special)]
        every += [*features(built, trace, example), *pixels(built, trace, example), *sounds(built, trace, example)]
        every += states(built, calls, trace, example)
    random.Random(seed).shuffle(every)
    kinds = {}
    for one in every:
        kinds.setdefault((one[0], one[1]), []).append(one)
    chosen = [group[:count] for group in kinds.values()]
    made = [make() for group in chosen for (_, _, make) in group]
    for change in made:
        change.patches = traces[change.example].grid is not None
    return made


def words(built, trace, example, name, special):
    """Changes of one token id each."""
    ids = built.inputs.get(name)
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point():
        return
    count, tokens, start = ids.shape[1], len(trace.tokens), 0
    joint = trace.decoder_start is not None
    beside = "encoder_hidden_states" in built.inputs and "decoder_input_ids" not in built.inputs
    # A decoder without tokens of its own is given those of the encoder, shifted.
    shifted = joint and not beside and "decoder_input_ids" not in built.inputs
    if name == "decoder_input_ids" or (joint and beside):
        start = trace.decoder_start if joint else tokens - count
    text = [n for n, role in enumerate(trace.roles) if role in ("text", "special")]
    if joint or tokens == count:
        places = range(start, start + count)
    elif len(text) == count:
        places = text
    else:
        return
    if max(places, default=tokens) >= tokens or min(places) < 0:
        return
    for at, place in enumerate(places):
        old = int(ids[example, at])
        new = next(n for n in range(20, 60) if n != old and n not in special)
        if old in special:
            continue

        def make(at=at, place=place, new=new):
            changed = ids.clone()
            changed[example, at] = new
            inputs = {**built.inputs, name: changed}
            return Change(example, place, inputs, f"{name}[{at}]", strict=not shifted)

        yield name, example, make


def features(built, trace, example):
    """Changes of one row each, where a model takes ready embeddings."""
    for name in ("inputs_embeds", "hidden_states", "src"):
        given = built.inputs.get(name)
        if isinstance(given, torch.Tensor) and given.ndim == 3 and given.shape[1] == len(trace.tokens):
            for at in range(given.shape[1]):

                def make(at=at, name=name, given=given):
                    changed = given.clone()
                    changed[example, at] += torch.randn(given.shape[2], generator=torch.Generator().manual_seed(at))
                    return Change(example, at, {**built.inputs, name: changed}, f"{name}[{at}]", True)

                yield name, example, make


def pixels(built, trace, example):
    """Changes of the pixels of one patch each, in the block of the image that the grid says."""
    patches = [n for n, role in enumerate(trace.roles) if role == "patch"]
    for name, images in built.inputs.items():
        fits = isinstance(images, torch.Tensor) and images.is_floating_point() and images.ndim in (4, 5)
        if not fits or trace.grid is None or name.endswith("mask"):
            continue
        *frames, rows, columns = trace.grid
        height, width = images.shape[-2:]
        if height % rows or width % columns or (frames and (images.ndim != 5 or images.shape[1] % frames[0])):
            continue
        for number, place in enumerate(patches):
            at = np.unravel_index(number, (frames[0] if frames else 1, rows, columns))
            yield name, example, partial(repainted, built.inputs, name, example, place, at, trace.grid)


def states(built, calls, trace, example):
    """Changes of one position each of what goes into the block of the first call, where all positions are there."""
    path = calls[0].module.split(".")
    numbers = [n for n, part in enumerate(path) if part.isdigit()]
    if not numbers or trace.decoder_start is not None:
        return
    module, seen = built.model.get_submodule(".".join(path[: numbers[0] + 1])), []

    def look(module, args, kwargs):
        state = args[0] if args else kwargs.get("hidden_states")
        seen.append(tuple(state.shape) if isinstance(state, torch.Tensor) else ())

    hook = module.register_forward_pre_hook(look, with_kwargs=True)
    ran(built.model, built.inputs)
    hook.remove()
    if len(seen) != 1 or len(seen[0]) != 3 or seen[0][1] != len(trace.tokens) or seen[0][0] <= example:
        return
    if trace.grid is not None or trace.layers[0].shape[2] != len(trace.tokens):
        return
    for place in range(seen[0][1]):
        yield "states", example, partial(restated, built.inputs, example, place, module)


def restated(inputs, example, place, module):
    """The change of one position of a state inside the model."""
    change = Change(example, place, inputs, f"state {place}", strict=True)
    change.module = module
    return change


def sounds(built, trace, example):
    """Changes of short times of a sound or a series, about where a position of the trace would stand.

    Where it really stands is not asked: convolutions may lie between.
    """
    for name in ("input_values", "input_features", "audio_values", "past_values"):
        given = built.inputs.get(name)
        if not isinstance(given, torch.Tensor) or not given.is_floating_point() or trace.grid is not None:
            continue
        axis = max(range(1, given.ndim), key=lambda n: given.shape[n])
        count, length = trace.decoder_start or len(trace.tokens), given.shape[axis]
        for place in range(1, count - 1, max(1, count // 6)):
            yield name, example, partial(resounded, built.inputs, name, example, place, axis, length * place // count)


def resounded(inputs, name, example, place, axis, start):
    """The change of a few numbers along an axis, from a start on."""
    changed = inputs[name].clone()
    part = changed[example].narrow(axis - 1, start, min(4, changed.shape[axis] - start))
    part += torch.randn(part.shape, generator=torch.Generator().manual_seed(place))
    return Change(example, place, {**inputs, name: changed}, f"{name} at {start}", strict=False, sure=False)


def repainted(inputs, name, example, place, at, grid):
    """The change of one patch, `at` its (frame, row, column) in a grid."""
    changed = inputs[name].clone()
    (frame, row, column), part = at, changed[example]
    if len(grid) == 3:
        deep = changed.shape[1] // grid[0]
        part = part[frame * deep : (frame + 1) * deep]
    tall, wide = changed.shape[-2] // grid[-2], changed.shape[-1] // grid[-1]
    block = part[..., row * tall : (row + 1) * tall, column * wide : (column + 1) * wide]
    block += torch.randn(block.shape, generator=torch.Generator().manual_seed(int(place)))
    return Change(example, place, {**inputs, name: changed}, f"patch ({row}, {column})", False)
