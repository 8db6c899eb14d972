"""Configurations of transformers made small, by what the names of fields mean in general; no table of families."""

import inspect
import re

VOCABULARY = 99
HEADS = 4
HEAD_DIM = 16
WIDTH = HEADS * HEAD_DIM

HIDDEN = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "emb_dim", "width", "embedding_size", "hidden_dim")
IMAGE = re.compile(r"(^|_)(image|img|crop|input_image|pretrain_image|sample)_size$|^resolution$")
LAYERS = re.compile(
    r"layers$|^n_layers?$|^depth$|(^|_)num_(hidden_)?layers_|_depth$|num_blocks$|^num_hidden_groups$|_layers_per_stage$"
)
HEAD_COUNT = re.compile(r"(^|_)(n|num)?_?(attention_|attn_|key_value_|kv_|query_)*(heads|head|heads_kv)$|_heads$")
SIZED_HEAD = re.compile(r"head_dim|head_size|^d_kv$|^d_head$|kv_channels|^attention_head_dim$")
TOKEN = re.compile(r"(token_id|token_ids|token_index|_token|_tok_id|token_idx|blank_id)$")
EXPERTS = re.compile(r"experts?$|^n_routed_experts$|num_local_experts|moe_num_experts")
CHOSEN = re.compile(r"experts_per_tok|top_?k|moe_k|^n_group$|topk_group")
WINDOW = re.compile(r"sliding_window|attention_window|local_attention|window_size|local_window|attention_chunk_size")
KEEP = re.compile(
    r"_id$|theta|rate|sampl|frames|version|lag|max_2d|coordinate|coord|bucket|max_distance|buckets|num_channels|"
    r"in_channels$|hop|n_fft|prediction|context_length|num_labels|scale|alpha|stride|kernel|min_|queries|max_time|"
    r"audio_channels|upsampl|multiple_of|multiple$|groups|positions$|position_embeddings|max_relative|num_bins|num_mel"
)
LENGTH = re.compile(r"position|max_length|max_len|seq_len|seq_length|max_seq|n_ctx|n_positions|context_size")


class Shrinker:
    """Shrinks one configuration and the ones inside it, by one rung of the ladder.

    rung 0: widths near 64, heads near 4, 2 layers, 99 words. 1: widths divided by 8, so that their ratios hold. 2: two
    heads as large as they were. 3: only layers and words are cut. Ids of special tokens that lie outside the vocabulary
    get numbers of their own inside it. sections: states the sections of rotary positions (text, rows, columns), which
    models otherwise take to be those of a large head.
    """

    def __init__(self, rung: int, sections: bool = False):
        self.rung, self.sections, self.ids, self.head = rung, sections, {}, 0

    def __call__(self, config_class, source=None):
        """A small configuration of a class; `source` holds the values to start from, else the defaults do."""
        source = source if source is not None else config_class()
        values = {name: value for name, value in vars(source).items() if not name.startswith("_")}
        self.head = self.head or self.largest_head(source)
        accepted = {*getattr(config_class, "__dataclass_fields__", ()), *inspect.signature(config_class).parameters}
        nested = {n: v for n, v in values.items() if hasattr(v, "to_dict") and n in accepted}
        changes = {name: self(type(value), value) for name, value in nested.items()}
        for name, value in values.items():
            if name in accepted and name not in nested:
                small = self.field(name, value, values)
                if small != value:
                    changes[name] = small
        self.types_of_layers(values, changes, accepted)
        self.states(values, changes, accepted)
        for name in accepted:
            if re.search(r"attn_(layer_)?(idxs|indices)$", name):
                changes[name] = [1]
            elif name == "prediction_length" and values.get(name) is None:
                changes[name] = 4
            elif name == "vocab_size" and values.get(name) is None:
                changes[name] = VOCABULARY
        if self.sections and isinstance(values.get("rope_parameters"), dict):
            rope = changes.get("rope_parameters", values["rope_parameters"])
            changes["rope_parameters"] = {
                **rope,
                "mrope_section": [HEAD_DIM // 8, 3 * HEAD_DIM // 16, 3 * HEAD_DIM // 16],
            }
        if "pad_token_id" in accepted and values.get("pad_token_id") is None:
            changes["pad_token_id"] = 0
        original = {n: v for n, v in self.own(source, accepted).items() if n not in changes}
        return config_class(**original, **changes)

    def largest_head(self, source):
        """The most features of a head, in a configuration or in one inside it."""
        values, most = vars(source), [16]
        main = next((values[n] for n in HIDDEN if isinstance(values.get(n), int)), 0)
        counts = [v for n, v in values.items() if HEAD_COUNT.search(n) and isinstance(v, int) and v > 0]
        given = values.get("head_dim")
        most.append(given if isinstance(given, int) else main // max(counts, default=1))
        inside = [v for v in values.values() if hasattr(v, "to_dict")]
        inside = [v for v in inside if hasattr(v, "vocab_size")] or inside
        return min(max([*most, *map(self.largest_head, inside)]), 256)

    def own(self, source, accepted):
        """The values in which a nested configuration differs from its defaults."""
        try:
            default = vars(type(source)())
        except Exception:
            return {}
        skipped = ("model_type", "transformers_version", "layer_types")
        return {
            n: v
            for n, v in vars(source).items()
            if n in accepted and n in default and n not in skipped and not hasattr(v, "to_dict") and default[n] != v
        }

    def field(self, name, value, values):
        """The small value of one field."""
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, dict):
            return self.rope(value) if "rope" in name else value
        if TOKEN.search(name):
            return [self.token(one) for one in value] if isinstance(value, list) else self.token(value)
        if isinstance(value, list | tuple):
            return self.several(name, value, values)
        return self.number(name, value, values) if isinstance(value, int) else value

    def token(self, value):
        """The id of a special token, inside the vocabulary; other ids stay different ids."""
        if not isinstance(value, int) or isinstance(value, bool) or value < VOCABULARY:
            return value
        return self.ids.setdefault(value, VOCABULARY - 1 - len(self.ids))

    def rope(self, value):
        """Sections of rotary positions, cut to the small size of a head."""
        small = {}
        for key, one in value.items():
            if isinstance(one, dict):
                small[key] = self.rope(one)
            elif isinstance(one, list) and one and all(isinstance(n, int) for n in one) and self.rung == 0:
                scaled = [max(1, n * (HEAD_DIM // 2) // sum(one)) for n in one]
                small[key] = [*scaled[:-1], HEAD_DIM // 2 - sum(scaled[:-1])]
            else:
                small[key] = one
        return small

    def several(self, name, value, values):
        """A list of numbers: those for each stage are cut to two stages, depths to at most 2 each."""
        if IMAGE.search(name) and len(value) == 2 and all(isinstance(one, int) for one in value):
            return type(value)([self.image(one, values) for one in value])
        if value and all(isinstance(one, list) and len(one) == 2 and isinstance(one[1], int) for one in value):
            return [[kinds, 1] for kinds, _ in value]  # kinds of layers, and how often they come again
        stages = next((len(v) for n, v in values.items() if "depths" in n and isinstance(v, list | tuple)), None)
        numbers = [one for one in value if isinstance(one, int) and not isinstance(one, bool)]
        if "depths" in name or (LAYERS.search(name) and len(numbers) == len(value)):
            value = type(value)([min(one, 2) if isinstance(one, int) else one for one in value])
        if WINDOW.search(name) and self.rung == 0 and len(numbers) == len(value):
            value = type(value)([min(one, 4) for one in value])
        if stages and len(value) == stages and self.rung == 0 and name not in ("out_features", "out_indices"):
            return type(value)(value[:2])
        return value

    def image(self, value, values):
        """The side of an image: four patches, or 32 pixels."""
        patch = values.get("patch_size")
        patch = patch[0] if isinstance(patch, list | tuple) and patch else patch
        if self.rung == 3 and value <= 256:
            return value
        if isinstance(patch, int) and patch > 1:
            return min(value, patch * max(4, 32 // patch)) if value >= patch else value
        return min(value, 64)

    def number(self, name, value, values):
        """The small value of a whole number."""
        few = value
        if IMAGE.search(name):
            few = self.image(value, values)
        elif "vocab" in name and "type" not in name:
            few = min(value, VOCABULARY)
        elif name.endswith(("_period", "_interval", "_every_n_layers", "_frequency")):
            few = min(value, 2)
        elif name.endswith("_offset") and "layer" in name:
            few = min(value, 1)
        elif EXPERTS.search(name):
            few = min(value, 4)
        elif CHOSEN.search(name):
            few = min(value, 1 if "group" in name else 2)
        elif LAYERS.search(name):
            few = min(value, 2)
        elif "tokens_per_image" in name:
            few = min(value, 4)
        elif WINDOW.search(name):
            few = min(value, 4) if self.rung == 0 else value
        elif HEAD_COUNT.search(name):
            few = self.heads(value, values)
        elif LENGTH.search(name):
            few = min(value, 32 if "source_positions" in name else 512)
        elif SIZED_HEAD.search(name) or name in ("rotary_dim", "rope_dim"):
            few = min(value, HEAD_DIM) if self.rung == 0 else value
        elif not KEEP.search(name) and value >= 64:
            few = self.width(name, value, values)
        return few

    def heads(self, value, values):
        """A number of heads; fewer heads for keys stay fewer."""
        if self.rung == 1:
            return value
        most = max(
            (v for n, v in values.items() if HEAD_COUNT.search(n) and isinstance(v, int) and not isinstance(v, bool)),
            default=value,
        )
        whole = HEADS if self.rung != 2 else 2
        return min(value, whole) if value == most else min(value, 2)

    def width(self, name, value, values):
        """A number of features: about 64 for the main one, the others in proportion."""
        by_stage = any(HEAD_COUNT.search(n) and isinstance(v, list | tuple) for n, v in values.items())
        if self.rung == 3 or by_stage:
            return value
        if self.rung == 1:
            return max(8, value // 8)
        main = next((values[n] for n in HIDDEN if isinstance(values.get(n), int)), value)
        if re.search(r"^out(put)?_(hidden_size|dim)$|^(lm|llm|text)_hidden_size$", name):
            main = value  # as wide as the model beside it
        width = 2 * self.head if self.rung == 2 else WIDTH
        return width * min(4, max(1, round(value / max(main, 1))))

    def states(self, values, changes, accepted):
        """The size of a head of a state-space layer, whose heads together are as wide as the layer expands."""
        for size in ("mamba_d_head", "mamba_head_dim"):
            heads = next((n for n in ("mamba_n_heads", "mamba_num_heads") if n in accepted), None)
            if size in accepted and heads and self.rung in (0, 2):
                width = changes.get("hidden_size", values.get("hidden_size", WIDTH))
                inner = changes.get("mamba_d_ssm", values.get("mamba_d_ssm")) or width * (
                    values.get("mamba_expand") or values.get("expand") or 2
                )
                changes[heads], changes[size] = HEADS, int(inner) // HEADS

    def types_of_layers(self, values, changes, accepted):
        """One layer of each kind where the kinds of layers are listed."""
        for name, kinds in values.items():
            if not (name in accepted and name.endswith(("layer_types", "layers_block_type", "_types", "block_types"))):
                continue
            if isinstance(kinds, list | tuple) and kinds and all(isinstance(kind, str) for kind in kinds):
                few = list(dict.fromkeys(kinds))
                if len(few) == 1:
                    continue  # made anew from the number of layers
                changes[name] = type(kinds)(few)
                for count in ("num_hidden_layers", "n_layers", "num_layers", "n_layer"):
                    if count in accepted and values.get(count) == len(kinds):
                        changes[count] = len(few)
