"""Builds one small seeded model with inputs that it runs on, or says why that cannot be."""

import contextlib
import dataclasses
import time
import warnings
from typing import Any

import torch

from sweep import inputs as recipes
from sweep.catalogue import CROSS
from sweep.shrink import Shrinker

PARAMETERS, SECONDS = 60e6, 20.0
LADDER = ((0,), (0, True), (1,), (2,), (3,))


class CannotBuildError(Exception):
    """No rung of the ladder gave a model that runs within the limits."""


class NoModelError(Exception):
    """The name stands for no model that can run by itself."""


@dataclasses.dataclass
class Built:
    """A model in evaluation mode, what it takes, and a function that makes a twin with eager attention, if it can."""

    model: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    eager: Any = None
    rung: str = ""


def first_line(error):
    """The class and the first line of an error."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        lines = lines[1:]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def build(case) -> Built:
    """The model of one case of the catalogue, or CannotBuildError with the reason."""
    return of_timm(case.name) if case.library == "timm" else of_transformers(case)


def randomise(model):
    """Weights that make attention far from even, and every part of the model felt: seeded, in the order of names."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if not parameter.requires_grad or not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            noise = torch.randn(parameter.shape, generator=random)
            if parameter.ndim >= 2:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            elif bool((parameter == parameter.flatten()[0]).all()):
                start = float(parameter.flatten()[0])
                parameter.copy_((1.0 if 0 < abs(start) < 0.5 else start) + 0.1 * noise)


def ran(model, inputs):
    """What the model returns, from a seed, without gradients."""
    torch.manual_seed(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(**inputs)


def tensors(value):
    """All tensors of floating point within an output."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [t for one in value.values() for t in tensors(one)]
    return [t for one in value for t in tensors(one)] if isinstance(value, list | tuple) else []


def finite(output):
    """Whether an output holds no NaN."""
    return not any(bool(t.isnan().any()) for t in tensors(output))


def with_inputs(model):
    """The first inputs that the model runs on; the first reason why it does not, otherwise."""
    reasons, started = [], time.monotonic()
    for batch in (2, 1):
        for inputs in recipes.candidates(model, batch=batch):
            asked = {}
            for _ in range(3):
                if time.monotonic() - started > SECONDS:
                    raise CannotBuildError(reasons[0] if reasons else "too slow")
                try:
                    before = time.monotonic()
                    ran(model, inputs)
                except Exception as error:
                    wanted = recipes.demanded(str(error), batch, recipes.Maker(model).facts("hidden_size", default=1))
                    if not asked:
                        reasons.append(first_line(error))
                    elif wanted is None:
                        reasons[-1] = first_line(error)
                    if wanted is None or not 0 < wanted[0] < 2000 or "input_ids" not in inputs or wanted == asked:
                        break
                    asked = wanted
                    make = recipes.Maker(model, batch=batch, placeholders=wanted[0], kind=wanted[1])
                    inputs = {**inputs, "input_ids": make.argument("input_ids", {})}
                    for name in ("mm_token_type_ids", "attention_mask", "token_type_ids"):
                        if name in inputs:
                            inputs[name] = make.argument(name, inputs)
                else:
                    if time.monotonic() - before > SECONDS:
                        raise CannotBuildError(f"one run takes more than {SECONDS:.0f} s")
                    return inputs
    raise CannotBuildError(reasons[0] if reasons else "no recipe for its inputs")


def of_transformers(case):
    """A model of transformers, by the ladder of shrinkings."""
    import transformers

    kind = getattr(transformers, case.name.removesuffix(CROSS))
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)) or kind.config_class is None:
        raise NoModelError("no model class")
    if kind.forward is torch.nn.Module.forward or "NotImplementedError" in str(kind.forward.__code__.co_names):
        raise NoModelError("no forward")
    reasons = []
    for rung in LADDER:
        try:
            config = Shrinker(*rung)(kind.config_class)
            torch.manual_seed(0)
            with torch.device("meta"):
                count = sum(p.numel() for p in kind(config).parameters())
            if count > PARAMETERS:
                raise CannotBuildError(f"{count / 1e6:.0f} million parameters")
        except CannotBuildError as error:
            reasons.append(first_line(error))
            continue
        except Exception as error:
            if "meta" not in str(error):
                reasons.append(first_line(error))
                continue
        try:
            config = Shrinker(*rung)(kind.config_class)
            if case.name.endswith(CROSS):
                config.is_decoder = config.add_cross_attention = True
            built = instance(kind, config, case.name.endswith(CROSS))
            built.rung = f"rung {rung[0]}"
            return built
        except Exception as error:
            reasons.append(first_line(error).removeprefix("CannotBuildError: "))
    raise CannotBuildError(next((r for r in reversed(reasons) if "million parameters" not in r), reasons[-1]))


def instance(kind, config, cross=False):
    """One model with its inputs; with random weights where they leave the outputs finite.

    cross: it is given the states of an encoder as well, as many as it has tokens.
    """
    torch.manual_seed(0)
    model = kind(config).eval().float()
    inputs = with_inputs(model)
    if cross:
        count = inputs["input_ids"].shape[1]
        states = recipes.Maker(model).argument("encoder_hidden_states", inputs)
        inputs = {**inputs, "encoder_hidden_states": states[:, :count].contiguous()}
        ran(model, inputs)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    randomise(model)
    good = False
    with contextlib.suppress(Exception):
        good = finite(ran(model, inputs))
    if not good:
        model.load_state_dict(state)

    def eager():
        twin_config = type(config).from_dict(config.to_dict())
        twin_config._attn_implementation = "eager"
        twin = kind(twin_config).eval().float()
        twin.load_state_dict(model.state_dict())
        return twin

    return Built(model, inputs, eager)


def of_timm(name):
    """An architecture of timm, at a small image where it takes one."""
    import timm

    ladder = [*({"img_size": size} for size in (64, 56, 96, 128)), {}]
    ladder += [{"img_size": size, "depth": 2} for size in (64, 56)]
    reasons = []
    for settings in ladder:
        try:
            with torch.device("meta"):
                count = sum(p.numel() for p in timm.create_model(name, **settings).parameters())
            if count > PARAMETERS:
                reasons.append(f"{count / 1e6:.0f} million parameters")
                continue
        except Exception as error:
            if "meta" not in str(error):
                reasons.append(first_line(error))
                continue
        try:
            torch.manual_seed(0)
            model = timm.create_model(name, **settings).eval()
            argument = recipes.signature(model)[0][0]
            sides = [settings["img_size"]] if "img_size" in settings else [64, 96, model.default_cfg["input_size"][-1]]
            for side in sides:
                random = torch.Generator().manual_seed(7)
                inputs = {argument: torch.randn(2, 3, side, side, generator=random)}
                try:
                    ran(model, inputs)
                except Exception as error:
                    reasons.append(first_line(error))
                    continue
                state = {key: value.clone() for key, value in model.state_dict().items()}
                randomise(model)
                if not finite(ran(model, inputs)):
                    model.load_state_dict(state)
                return Built(model, inputs, rung=str(settings or side))
        except Exception as error:
            reasons.append(first_line(error))
    raise CannotBuildError(reasons[-1])
