"""What a model takes, derived from the names of its forward's arguments and the numbers in its configuration.

`candidates` yields sets of inputs, the fullest first; `build.py` takes the first that runs. A batch holds two different
examples. Placeholders for images or sounds in the text are added as many as the model's own error message demands.
"""

import inspect
import re

import torch

WORDS, ANSWER = 7, 5
MISMATCH = re.compile(r"do(?:es)? not match.*?tokens:?\D*(\d+).*?features:?\D*(\d+)", re.S | re.I)


class Facts:
    """Numbers of a configuration or of one inside it, by any of several names."""

    def __init__(self, config):
        self.config = config

    def __call__(self, *names, default=None):
        waiting = [self.config]
        while waiting:
            config = waiting.pop(0)
            for name in names:
                try:
                    value = getattr(config, name, None) if not isinstance(config, dict) else config.get(name)
                except Exception:
                    value = None  # one that differs from layer to layer
                if value is not None:
                    return value
            values = config.values() if isinstance(config, dict) else vars(config).values()
            waiting += [v for v in values if hasattr(v, "to_dict")]
        return default

    def pair(self, *names, default):
        value = self(*names, default=default)
        if isinstance(value, dict):
            value = (value.get("height", default), value.get("width", default))
        value = tuple(value) if isinstance(value, list | tuple) else (value, value)
        return value if len(value) == 2 else (value[-2], value[-1])


class Maker:
    """Makes arguments by their names, from a seed."""

    def __init__(self, model, batch=2, placeholders=0, kind="image", words=WORDS):
        self.facts = Facts(model.config) if hasattr(model, "config") else Facts({})
        self.model, self.batch, self.words = model, batch, words
        self.placeholders, self.kind = placeholders, kind
        self.random = torch.Generator().manual_seed(7)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.random)

    def whole(self, low, high, *shape):
        return torch.randint(low, max(high, low + 1), shape, generator=self.random)

    def special(self, *names):
        for name in names:
            value = self.facts(f"{name}_token_id", f"{name}_token_index", f"{name}_token_idx", f"{name}_token")
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int):
                return value
        return None

    def ids(self, count, placeholders=True):
        vocabulary = self.facts("vocab_size", default=99)
        vocabulary = vocabulary if isinstance(vocabulary, int) else 99
        ids = self.whole(min(5, vocabulary - 2), min(60, vocabulary - 1), self.batch, count)
        end = self.special("eos")
        if end is not None and 0 <= end < vocabulary:
            ids[:, -1] = end
        place = self.special(self.kind, "image", "audio") if placeholders and self.placeholders else None
        if place is not None:
            middle = torch.full((self.batch, self.placeholders), place)
            ids = torch.cat([ids[:, :3], middle, ids[:, 3:]], 1)
        return ids

    @property
    def channels(self):
        return self.facts("num_channels", "in_channels", "in_chans", "image_channels", default=3)

    def images(self, *before):
        height, width = self.facts.pair("image_size", "img_size", "input_size", "resolution", default=64)
        return self.normal(*before, self.channels, height, width)

    def frames(self):
        count = self.facts("num_frames", "frames_per_clip", "num_image_with_embedding", default=4)
        return self.images(self.batch, count if isinstance(count, int) else 4)

    def flat(self, side=4):
        """Patches cut out beforehand, one row each: their number for every image, and a row's length."""
        patch = self.facts.pair("patch_size", "spatial_patch_size", default=14)
        frames = self.facts("temporal_patch_size", default=1)
        channels = self.facts("in_channels", "num_channels", "in_chans", default=3)
        return side * side, channels * frames * patch[0] * patch[1]

    def sound(self, transposed=False):
        bins = self.facts(
            "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", "mel_bins", "num_mels", "n_mels",
            "feature_projection_input_dim", "input_channels", default=80,
        )  # fmt: skip
        length = self.facts("max_source_positions", default=None)
        length = 2 * length if isinstance(length, int) and transposed else 64
        return self.normal(self.batch, bins, length) if transposed else self.normal(self.batch, 64, bins)

    def boxes(self, count):
        most = min(self.facts("max_2d_position_embeddings", "coordinate_size", default=100), 100)
        corner = self.whole(0, most // 2, self.batch, count, 2)
        return torch.cat([corner, corner + self.whole(1, most // 2, self.batch, count, 2)], -1)

    def argument(self, name, given):
        """One argument by its name, or None where nothing is known of it. `given`: those made before."""
        batch, count = self.batch, given["input_ids"].shape[1] if "input_ids" in given else self.words
        hidden = self.facts("hidden_size", "d_model", "n_embd", default=64)
        past = self.facts("context_length", "input_size", default=16)
        lags = max(self.facts("lags_sequence", default=[0]) or [0])
        series = self.facts("num_input_channels", "input_size", default=1)
        times = max(1, self.facts("num_time_features", default=1))
        ahead = self.facts("prediction_length", default=4)
        if name in ("input_ids", "input", "qformer_input_ids", "tasks_input_ids", "classes_input_ids"):
            return self.ids(self.words, name == "input_ids")
        recipes = {
            "decoder_input_ids": lambda: self.ids(ANSWER, False),
            "attention_mask": lambda: torch.ones(batch, count, dtype=torch.long),
            "token_type_ids": lambda: torch.zeros(batch, count, dtype=torch.long),
            "pixel_values": lambda: self.images(batch),
            "pixel_values_videos": self.frames,
            "pixel_mask": lambda: torch.ones(batch, *given["pixel_values"].shape[-2:], dtype=torch.long),
            "bbox": lambda: self.boxes(count),
            "input_features": self.sound,
            "input_features_mask": lambda: torch.ones(batch, given["input_features"].shape[1], dtype=torch.long),
            "input_values": lambda: self.normal(batch, 4000),
            "audio_values": lambda: self.normal(batch, 1, 4000),
            "inputs_embeds": lambda: self.normal(batch, count, hidden),
            "hidden_states": lambda: self.normal(batch, count, hidden),
            "encoder_hidden_states": lambda: self.normal(batch, count + 2, hidden),
            "mm_token_type_ids": lambda: (given["input_ids"] == self.special("image")).long(),
            "visual_feats": lambda: self.normal(batch, 4, self.facts("visual_feat_dim", default=64)),
            "visual_pos": lambda: torch.rand(batch, 4, self.facts("visual_pos_dim", default=4), generator=self.random),
            "image": lambda: self.images(batch),
            "lang_feats": lambda: self.normal(batch, count, hidden),
            "flattened_patches": lambda: self.pieces(),
            "inputs": lambda: self.ids(self.facts("max_position_embeddings", default=self.words), False),
            "past_values": lambda: self.normal(batch, past + lags, *((series,) if series != 1 else ())),
            "past_observed_mask": lambda: torch.ones_like(given["past_values"]),
            "past_time_features": lambda: self.normal(batch, past + lags, times),
            "future_time_features": lambda: self.normal(batch, ahead, times),
            "future_values": lambda: self.normal(batch, ahead, *((series,) if series != 1 else ())),
            "spectrogram": lambda: self.normal(batch, 20, self.facts("model_in_dim", "num_mel_bins", default=80)),
            "pixel_attention_mask": lambda: torch.ones(batch, 16, dtype=torch.long),
            "spatial_shapes": lambda: torch.tensor([[4, 4]] * batch),
            "input_points": lambda: torch.rand(batch, 1, 2, 2, generator=self.random) * 20,
            "prompt_pixel_values": lambda: self.images(batch),
            "prompt_masks": lambda: self.images(batch).abs(),
            "task_inputs": lambda: self.ids(self.facts("task_seq_len", default=77), False),
            "image_sizes": lambda: torch.tensor([given["pixel_values"].shape[-2:]] * batch),
            "noise": lambda: torch.rand(batch, 4096, generator=self.random)[:, : self.facts("num_patches", default=16)],
        }
        try:
            return recipes[name]() if name in recipes else None
        except (KeyError, TypeError, RuntimeError):
            return None  # what it is made from is not among the arguments, or is of another kind

    def pieces(self):
        """Patches with their row and column before them (Pix2Struct)."""
        patch = self.facts("patch_size", default=16)
        places = torch.cartesian_prod(torch.arange(1.0, 5), torch.arange(1.0, 5)).expand(self.batch, -1, -1)
        return torch.cat([places, self.normal(self.batch, 16, 3 * patch * patch)], -1)


def signature(model):
    """Arguments of a forward, and those without a default."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [p.name for p in named], [p.name for p in named if p.default is p.empty]


def candidates(model, **how):
    """Sets of inputs to try, the fullest first."""
    make = Maker(model, **how)
    known, required = signature(model)
    main = getattr(model, "main_input_name", "input_ids")
    main = list(main) if isinstance(main, list | tuple) else [main]
    stems = ("input_ids", "pixel_values", "input_features", "input_values", "audio_values")
    text = [n for n in stems if n in known and (n in [*main, *required] or n in ("input_ids", "pixel_values"))]
    sound = [n for n in ("input_features", "audio_values", "input_values") if n in known]
    more = [n for n in ("bbox", "decoder_input_ids", "pixel_mask") if n in known]
    always = [n for n in [*main, *required] if n in known]
    choices = [[*text, *always, *more], [*text, *always, *sound, *more]]
    choices += [[*always, *more], always, required, [*text[:1], *more], [*text, *always, "attention_mask"]]
    choices += [[*always, "future_time_features", "future_values"], [*always, *more, "encoder_hidden_states"]]
    choices += [[*always, "image_sizes"], [*always, "token_type_ids"], ["pixel_values_videos"]]
    choices += [[*always, *sound, "input_features_mask"]]
    seen = set()
    for names in choices:
        names = [name for name in dict.fromkeys(names) if name in known]
        if not names or tuple(names) in seen:
            continue
        seen.add(tuple(names))
        yield from variants(make, known, names)


def variants(make, known, names):
    """One choice of arguments in the few shapes that arguments of these names have."""
    given = {}
    grids = [n for n in ("image_grid_thw", "grid_thw") if n in known]
    for name in names:
        value = make.argument(name, given)
        if value is not None:
            given[name] = value
    if "mm_token_type_ids" in known and "input_ids" in given and make.special("image") is not None:
        given["mm_token_type_ids"] = make.argument("mm_token_type_ids", given)
    unknown = [n for n in names if n not in given and n not in grids]
    if not given or unknown:
        return
    if grids:
        count, length = make.flat()
        place = next((n for n in ("pixel_values", "hidden_states") if n in given), None)
        grid = torch.tensor([[1, 4, 4]] * make.batch)
        if place:
            yield {**given, place: make.normal(make.batch * count, length), grids[0]: grid}
    if "spatial_shapes" in known and "pixel_values" in given:
        count, length = make.flat()
        shapes = {n: make.argument(n, given) for n in ("pixel_attention_mask", "spatial_shapes") if n in known}
        yield {**given, **shapes, "pixel_values": make.normal(make.batch, count, length)}
    if "pixel_values" in given and make.facts("num_frames") and "frames" in str(vars(make.model.config)):
        yield {**given, "pixel_values": make.frames()}
    yield given
    if "input_features" in given:
        yield {**given, "input_features": make.sound(transposed=True)}
    if "input_values" in given:
        length = make.facts("max_length", "context_length", default=64)
        bins = make.facts("num_mel_bins", "num_mels", default=80)
        yield {**given, "input_values": make.normal(make.batch, 1, 4000)}
        yield {**given, "input_values": make.normal(make.batch, length, bins)}
        yield {**given, "input_values": make.ids(make.words, False)}
    if "pixel_values" in given:
        yield {**given, "pixel_values": make.images(make.batch, 1)}
        if "pixel_mask" in given:
            yield {n: v for n, v in given.items() if n != "pixel_mask"}
    if "decoder_input_ids" in given and "input_ids" not in given:
        yield {n: v for n, v in given.items() if n != "decoder_input_ids"}
    if "hidden_states" in given:
        yield {**given, "hidden_states": make.images(make.batch)}
    if "past_values" in given:
        length = make.facts("context_length", default=16)
        yield {**given, "past_values": make.normal(make.batch, length, make.facts("num_input_channels", default=1))}
        yield {**given, "past_values": make.normal(make.batch, length)}


def demanded(message, batch, width):
    """(placeholders for each example, of what) that an error message demands; or None.

    Some messages count the numbers of all features, `width` of each: then as many tokens as it asks for are too many.
    """
    found = MISMATCH.search(message)
    if not found:
        return None
    kind = next((k for k in ("video", "audio", "image") if k in message.lower()), "image")
    count = int(found[2]) // batch
    return (count // width if found[1] == found[2] else count), kind
