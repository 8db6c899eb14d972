"""The names of all cases: model classes of transformers, architectures of timm."""

import dataclasses
import importlib
import re
from pathlib import Path

CROSS = " with encoder_hidden_states"


@dataclasses.dataclass(frozen=True, order=True)
class Case:
    """One class of transformers, or one architecture of timm. order: base models come first."""

    order: int
    library: str
    name: str
    family: str


def transformers_cases():
    """Every public class that lives in a module of models: base models first, then task heads."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    bases = {n for names in MODEL_MAPPING_NAMES.values() for n in ([names] if isinstance(names, str) else names)}
    cases = []
    for name, module in transformers._class_to_module.items():
        found = re.search(r"models\.(\w+)\.modeling_", module)
        if not found or found[1] in ("auto", "deprecated") or name.endswith(("PreTrainedModel", "PretrainedModel")):
            continue
        if not name[0].isupper() or name.isupper() or name.startswith(("TF", "Flax")):
            continue
        order = 0 if name in bases else 1 if name.endswith(("Model", "Encoder", "Decoder", "Backbone")) else 2
        cases.append(Case(order, "transformers", name, found[1]))
    home = Path(transformers.__file__).parent / "models"
    for case in [case for case in cases if case.order == 0]:
        texts = [path.read_text() for path in (home / case.family).glob("configuration_*.py")]
        if any("    add_cross_attention:" in text for text in texts):
            cases.append(dataclasses.replace(case, order=1, name=case.name + CROSS))
    return sorted(cases)


class _Seen(BaseException):
    """Carries the class that an entry function of timm is about to build."""


def timm_cases(everything=False):
    """One architecture for each class of each file of timm, the smallest by its name; or all of them.

    Architectures of one class whose parts are of other classes (another kind of block) count as another class.
    """
    import timm

    modules = [importlib.import_module(f"timm.models.{name}") for name in timm.list_modules()]

    def stop(kind, *args, **kwargs):
        parts = [getattr(v, "func", v) for v in kwargs.values() if callable(v)]
        raise _Seen(" ".join([kind.__name__, *sorted(getattr(part, "__name__", "") for part in parts)]))

    kept = {}
    originals = [(m, m.build_model_with_cfg) for m in modules if hasattr(m, "build_model_with_cfg")]
    for module, _ in originals:
        module.build_model_with_cfg = stop
    try:
        for module in timm.list_modules():
            for name in timm.list_models(module=module):
                try:
                    timm.create_model(name)
                    kind = ""
                except _Seen as seen:
                    kind = str(seen.args[0])
                except Exception:
                    kind = ""
                kept.setdefault((module, kind), []).append(name)
    finally:
        for module, original in originals:
            module.build_model_with_cfg = original
    if everything:
        return sorted(Case(0, "timm", name, module) for (module, _), names in kept.items() for name in names)
    return sorted(Case(0, "timm", min(names, key=size), module) for (module, _), names in kept.items())


WORDS = (
    "test",
    "atto",
    "femto",
    "pico",
    "nano",
    "xxs",
    "xxtiny",
    "xtiny",
    "tiny",
    "xs",
    "micro",
    "mini",
    "small",
    "_s",
)


def size(name):
    """A rank of architectures by the words for sizes in their names, smallest first."""
    words = [rank for rank, word in enumerate(WORDS) if word in name]
    numbers = [int(n) for n in re.findall(r"\d+", name)]
    return (words[0] if words else len(WORDS), numbers[-1:] or [0], numbers[:1] or [0], name)
