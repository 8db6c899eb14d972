"""Tiny random models of many families, each with an independent way to its own attention weights.

FAMILIES maps a name to a function that returns (model, inputs, expected): the model in evaluation mode with its fast
kernel, keyword inputs for a batch, and a function that gives the expected weights, one (batch, head, query, key) per
layer, by another road: eager attention, timm's unfused path, or nn.MultiheadAttention's need_weights.
"""

import contextlib
import inspect

import timm
import torch
import torchvision
import transformers as hf

SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {
    **SMALL,
    "vocab_size": 99,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ONES = torch.ones(2, 7, dtype=torch.long)
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18]])


VISION = {**SMALL, "image_size": 32, "patch_size": 8}
VIDEO = {**SMALL, "image_size": (16, 24), "num_frames": 4}


def images(height=32, width=32):
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


def video():
    return torch.randn(2, 4, 3, 16, 24, generator=torch.Generator().manual_seed(0))


def huggingface(model_class, config, kernel="sdpa", tower=None, **inputs):
    """A model, or one tower of it, with its kernel beside the same weights with eager attention."""
    torch.manual_seed(0)
    config._attn_implementation = kernel
    model = model_class(config).eval()
    twin_config = type(config)(**config.to_dict())
    twin_config._attn_implementation = "eager"
    twin = model_class(twin_config).eval()
    twin.load_state_dict(model.state_dict())
    model, twin = (whole.get_submodule(tower or "") for whole in (model, twin))

    def expected():
        with torch.no_grad():
            return list(twin(**inputs, output_attentions=True).attentions)

    return model, inputs, expected


def timm_model(name, size=64, **settings):
    """A timm model with fused attention beside its own unfused path, read where the weights are dropped out."""
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=size, embed_dim=48, num_heads=4, depth=3, **settings).eval()
    height, width = (size, size) if isinstance(size, int) else size
    x = images(height, width)
    assert all(block.attn.fused_attn for block in model.blocks)

    def expected():
        seen = []
        with unfused(model, seen), torch.no_grad():
            model(x)
        return seen

    return model, {"x": x}, expected


@contextlib.contextmanager
def unfused(model, seen):
    """A timm model without its fused kernel, while it is entered; its weights are added to `seen`."""
    hooks = []
    for block in model.blocks:
        block.attn.fused_attn = False
        hooks.append(block.attn.attn_drop.register_forward_hook(lambda _, args, __: seen.append(args[0])))
    try:
        yield
    finally:
        for block, hook in zip(model.blocks, hooks, strict=True):
            block.attn.fused_attn = True
            hook.remove()


def multi_head(model, inputs, call):
    """nn.MultiheadAttention inside `model`, asked for its weights with the arguments it was called with."""

    def expected():
        seen, hooks = [], []
        asking = {"need_weights": True, "average_attn_weights": False}
        for module in model.modules():
            if isinstance(module, torch.nn.MultiheadAttention):

                def hook(module, args, kwargs, output):
                    seen.append(torch.nn.MultiheadAttention.forward(module, *args, **{**kwargs, **asking})[1])

                hooks.append(module.register_forward_hook(hook, with_kwargs=True))
        with torch.no_grad():
            call(model, inputs)
        for hook in hooks:
            hook.remove()
        return seen

    return model, inputs, expected


def into_dropout(model, kinds, inputs):
    """The weights (batch, head, query, key) that go into the dropouts of modules of some kinds, in forward order."""
    seen, hooks = [], []
    for module in model.modules():
        for part in module.children() if isinstance(module, kinds) else ():
            if isinstance(part, torch.nn.Dropout):
                hooks.append(part.register_forward_hook(lambda _, args, __: seen.append(args[0])))
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return [weights for weights in seen if weights.ndim == 4]


def at_places(weights, places, size):
    """Weights (batch * window, head, token, token) among `size` positions, given the windows' places (window, token).

    Positions outside all windows attend to themselves, those in several to the mean of what their copies attend to.
    """
    windows = weights.unflatten(0, (-1, len(places)))
    joint, copies = torch.zeros(len(windows), windows.shape[2], size, size), torch.zeros(size)
    for window, place in enumerate(places):
        joint[:, :, place[:, None], place] += windows[:, window]
        copies[place] += 1
    outside = (copies == 0).nonzero().flatten()
    joint[:, :, outside, outside] = 1
    return joint / copies.clamp(min=1)[:, None]


def shifted_windows(rows, columns, shift):
    """The places (window, token) of windows of 4 x 4 over patches rolled up and to the left (Liu et al. 2021)."""
    places = torch.arange(rows * columns).view(rows, columns).roll((-shift, -shift), (0, 1))
    return places.view(rows // 4, 4, columns // 4, 4).transpose(1, 2).reshape(-1, 16)


def swin_layers(weights):
    """Two layers over 8 x 16 patches, the second shifted, merging two by two, and one layer over 4 x 8."""
    quarters = torch.arange(128).view(4, 2, 8, 2).transpose(1, 2).reshape(32, 4)
    return [
        at_places(weights[0], shifted_windows(8, 16, 0), 128),
        at_places(weights[1], shifted_windows(8, 16, 2), 128),
        torch.zeros(32, 128).scatter(1, quarters, 0.25).expand(2, 1, -1, -1),
        at_places(weights[2], shifted_windows(4, 8, 0), 32),
    ]


def bert():
    return huggingface(hf.BertModel, hf.BertConfig(**TEXT), input_ids=IDS)


def roberta():
    return huggingface(hf.RobertaModel, hf.RobertaConfig(**TEXT), input_ids=IDS)


def distilbert():
    config = hf.DistilBertConfig(dim=32, n_layers=3, n_heads=4, hidden_dim=64, vocab_size=99)
    return huggingface(hf.DistilBertModel, config, input_ids=IDS)


def albert():
    config = hf.AlbertConfig(**TEXT, embedding_size=16)
    return huggingface(hf.AlbertModel, config, input_ids=IDS)


def gpt2():
    config = hf.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=99, bos_token_id=1, eos_token_id=2)
    return huggingface(hf.GPT2Model, config, input_ids=IDS)


def llama_gqa():
    return huggingface(hf.LlamaModel, hf.LlamaConfig(**TEXT, num_key_value_heads=2), input_ids=IDS)


def mistral_sliding_window():
    config = hf.MistralConfig(**TEXT, num_key_value_heads=2, sliding_window=3)
    return huggingface(hf.MistralModel, config, input_ids=IDS)


def t5_encoder():
    config = hf.T5Config(d_model=32, d_kv=8, num_layers=3, num_heads=4, d_ff=64, vocab_size=99)
    return huggingface(hf.T5EncoderModel, config, input_ids=IDS)


def electra():
    return huggingface(hf.ElectraModel, hf.ElectraConfig(**TEXT, embedding_size=16), input_ids=IDS)


def xlm_roberta():
    return huggingface(hf.XLMRobertaModel, hf.XLMRobertaConfig(**TEXT), input_ids=IDS)


def esm():
    return huggingface(hf.EsmModel, hf.EsmConfig(**TEXT, mask_token_id=3), input_ids=IDS, attention_mask=ONES)


def modernbert_sliding_window():
    config = hf.ModernBertConfig(
        **TEXT, cls_token_id=1, sep_token_id=2, local_attention=4, global_attn_every_n_layers=2
    )
    return huggingface(hf.ModernBertModel, config, input_ids=IDS)


def deberta_v2():
    config = hf.DebertaV2Config(**TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"])
    return huggingface(hf.DebertaV2Model, config, "eager", input_ids=IDS)


def bert_eager():
    return huggingface(hf.BertModel, hf.BertConfig(**TEXT), "eager", input_ids=IDS)


def bert_of_two_kernels():
    model, inputs, expected = bert()
    eager, _, _ = bert_eager()
    model.encoder.layer[1] = eager.encoder.layer[1]
    return model, inputs, expected


def qwen3():
    return huggingface(hf.Qwen3Model, hf.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=8), input_ids=IDS)


def gemma2_soft_capping():
    config = hf.Gemma2Config(**TEXT, num_key_value_heads=2, head_dim=8, sliding_window=3)
    return huggingface(hf.Gemma2Model, config, "eager", input_ids=IDS)


def gemma3():
    config = hf.Gemma3TextConfig(**TEXT, num_key_value_heads=2, head_dim=8, sliding_window=3)
    return huggingface(hf.Gemma3TextModel, config, input_ids=IDS)


def phi3():
    return huggingface(hf.Phi3Model, hf.Phi3Config(**TEXT), input_ids=IDS)


def gpt_oss_sinks():
    config = hf.GptOssConfig(
        **TEXT, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4
    )
    return huggingface(hf.GptOssModel, config, "eager", input_ids=IDS)


def opt():
    config = hf.OPTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, ffn_dim=64, vocab_size=99, word_embed_proj_dim=32
    )
    return huggingface(hf.OPTModel, config, input_ids=IDS, attention_mask=ONES)


def bloom_alibi():
    config = hf.BloomConfig(hidden_size=32, n_layer=3, n_head=4, vocab_size=99)
    return huggingface(hf.BloomModel, config, "eager", input_ids=IDS)


def falcon_multi_query():
    # Without ALiBi: with it, this model's own eager and fused kernels differ by 0.07.
    config = hf.FalconConfig(**TEXT, alibi=False, new_decoder_architecture=False, multi_query=True)
    return huggingface(hf.FalconModel, config, input_ids=IDS)


def vit():
    return huggingface(hf.ViTModel, hf.ViTConfig(**SMALL, image_size=32, patch_size=8), pixel_values=images())


def vit_not_square():
    config = hf.ViTConfig(**SMALL, image_size=(32, 48), patch_size=8)
    return huggingface(hf.ViTModel, config, pixel_values=images(32, 48))


def deit_distilled():
    config = hf.DeiTConfig(**SMALL, image_size=32, patch_size=8)
    return huggingface(hf.DeiTModel, config, pixel_values=images())


def dinov2_registers():
    settings = {name: value for name, value in SMALL.items() if name != "intermediate_size"}
    config = hf.Dinov2WithRegistersConfig(**settings, image_size=28, patch_size=7, num_register_tokens=4)
    return huggingface(hf.Dinov2WithRegistersModel, config, pixel_values=images(28, 42))


def clip_vision():
    config = hf.CLIPVisionConfig(**SMALL, image_size=32, patch_size=8)
    return huggingface(hf.CLIPVisionModel, config, pixel_values=images())


def dinov3_registers():
    config = hf.DINOv3ViTConfig(**SMALL, image_size=32, patch_size=8, num_register_tokens=4)
    return huggingface(hf.DINOv3ViTModel, config, pixel_values=images(32, 48))


def beit_relative_positions():
    config = hf.BeitConfig(**SMALL, image_size=32, patch_size=8, use_relative_position_bias=True)
    return huggingface(hf.BeitModel, config, pixel_values=images())


def clip_text():
    return huggingface(hf.CLIPTextModel, hf.CLIPTextConfig(**{**TEXT, "eos_token_id": 11}), input_ids=IDS)


def clip_vision_tower():
    config = hf.CLIPConfig(text_config={**TEXT, "eos_token_id": 11}, vision_config=VISION)
    return huggingface(hf.CLIPModel, config, tower="vision_model", pixel_values=images())


def clip_text_tower():
    config = hf.CLIPConfig(text_config={**TEXT, "eos_token_id": 11}, vision_config=VISION)
    return huggingface(hf.CLIPModel, config, tower="text_model", input_ids=IDS)


def siglip_text_tower():
    config = hf.SiglipConfig(text_config=TEXT, vision_config=VISION)
    return huggingface(hf.SiglipModel, config, tower="text_model", input_ids=IDS)


def siglip_vision_tower():
    config = hf.SiglipConfig(text_config=TEXT, vision_config=VISION)
    model, inputs, stack = huggingface(hf.SiglipModel, config, tower="vision_model", pixel_values=images())
    _, _, pooling = multi_head(model, inputs, lambda model, inputs: model(**inputs))
    return model, inputs, lambda: [*stack(), *pooling()]


def vilt():
    """Text, [CLS] and patches in one stream, the second example with padding in both."""
    torch.manual_seed(0)
    model = hf.ViltModel(hf.ViltConfig(**{**VISION, "vocab_size": 99, "max_image_length": -1})).eval()
    mask, shown = torch.ones(2, 7, dtype=torch.long), torch.ones(2, 32, 48, dtype=torch.long)
    mask[1, 5:], shown[1, :, 32:], shown[1, 24:] = 0, 0, 0
    inputs = {"input_ids": IDS, "attention_mask": mask, "pixel_values": images(32, 48), "pixel_mask": shown}

    def expected():
        embed, chosen = model.embeddings.visual_embed, []

        def watched(*args, **kwargs):
            result = embed(*args, **kwargs)
            chosen.append(result[2][0])
            return result

        model.embeddings.visual_embed = watched
        with torch.no_grad():
            attentions = model(**inputs, output_attentions=True).attentions
        del model.embeddings.visual_embed
        # Patches come in random order, with masked ones among them: row and column tell.
        orders = []
        for example, (text, rows, columns) in enumerate(((7, 4, 6), (5, 3, 4))):
            at = {tuple(place): 8 + number for number, place in enumerate(chosen[0][example].tolist())}
            patches = [at[row, column] for row in range(rows) for column in range(columns)]
            orders.append(torch.tensor([*range(text), 7, *patches]))
        return [[one[:, order][..., order] for one, order in zip(layer, orders, strict=True)] for layer in attentions]

    return model, inputs, expected


def videomae():
    return huggingface(hf.VideoMAEModel, hf.VideoMAEConfig(**VIDEO, patch_size=8), pixel_values=video())


def vivit():
    return huggingface(hf.VivitModel, hf.VivitConfig(**VIDEO, tubelet_size=[2, 8, 8]), pixel_values=video())


def timesformer(attention_type):
    torch.manual_seed(0)
    config = hf.TimesformerConfig(**SMALL, image_size=16, patch_size=8, num_frames=4, attention_type=attention_type)
    model, inputs = hf.TimesformerModel(config).eval(), {"pixel_values": video()[..., :16]}
    kind = hf.models.timesformer.modeling_timesformer.TimesformerSelfAttention
    return model, inputs, lambda: into_dropout(model, kind, inputs)


def timesformer_divided_space_time():
    model, inputs, weights = timesformer("divided_space_time")
    patches = 1 + torch.arange(16).view(4, 4)  # (frame, place)
    frames = torch.cat([torch.zeros(4, 1, dtype=torch.long), patches], 1)
    return model, inputs, lambda: [at_places(one, (patches.mT, frames)[n % 2], 17) for n, one in enumerate(weights())]


def timesformer_joint_space_time():
    model, inputs, weights = timesformer("joint_space_time")
    order = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.arange(16).view(4, 4).mT.flatten()])
    return model, inputs, lambda: [at_places(one, order[None], 17) for one in weights()]


def swin():
    config = hf.SwinConfig(image_size=(32, 64), window_size=4, embed_dim=16, depths=[2, 1], num_heads=[2, 4])
    config._attn_implementation = "sdpa"
    model = hf.SwinModel(config).eval()
    inputs = {"pixel_values": images(32, 64)}

    def expected():
        model.set_attn_implementation("eager")
        seen, attend = [], hf.models.swin.modeling_swin.SwinAttention
        hooks = [
            m.register_forward_hook(lambda *call: seen.append(call[2][1]))
            for m in model.modules()
            if isinstance(m, attend)
        ]
        with torch.no_grad():
            model(**inputs)
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation("sdpa")
        return swin_layers(seen)

    return model, inputs, expected


def swin_v2():
    torch.manual_seed(0)
    config = hf.Swinv2Config(image_size=(32, 64), window_size=4, embed_dim=16, depths=[2, 1], num_heads=[2, 4])
    model, inputs = hf.Swinv2Model(config).eval(), {"pixel_values": images(32, 64)}
    kind = hf.models.swinv2.modeling_swinv2.Swinv2SelfAttention
    return model, inputs, lambda: swin_layers(into_dropout(model, kind, inputs))


def timm_swin():
    torch.manual_seed(0)
    settings = {"img_size": (32, 64), "window_size": 4, "embed_dim": 16, "depths": (2, 1), "num_heads": (2, 4)}
    model, inputs = timm.create_model("swin_tiny_patch4_window7_224", **settings).eval(), {"x": images(32, 64)}
    kind = timm.models.swin_transformer.WindowAttention
    return model, inputs, lambda: swin_layers(into_dropout(model, kind, inputs))


def torchvision_swin():
    torch.manual_seed(0)
    settings = {"patch_size": [4, 4], "window_size": [4, 4], "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4]}
    model = torchvision.models.SwinTransformer(**settings).eval()
    inputs = {"x": images(32, 64)}

    def expected():
        seen, softmax = [], torch.nn.functional.softmax
        torch.nn.functional.softmax = lambda *args, **kwargs: seen.append(softmax(*args, **kwargs)) or seen[-1]
        try:
            with torch.no_grad():
                model(**inputs)
        finally:
            torch.nn.functional.softmax = softmax
        return swin_layers(seen)

    return model, inputs, expected


def beit_not_square():
    config = hf.BeitConfig(**SMALL, image_size=(32, 48), patch_size=8, use_relative_position_bias=True)
    return huggingface(hf.BeitModel, config, pixel_values=images(32, 48))


def timm_eva02_not_square():
    return timm_model("eva02_tiny_patch14_224", size=(42, 70))


def timm_vit():
    return timm_model("vit_tiny_patch16_224")


def timm_eva02():
    return timm_model("eva02_tiny_patch14_224", size=56)


def timm_beit():
    return timm_model("beit_base_patch16_224")


def timm_vit_not_square():
    return timm_model("vit_tiny_patch16_224", size=(48, 80))


def timm_deit_distilled():
    return timm_model("deit_tiny_distilled_patch16_224")


def timm_registers():
    return timm_model("vit_small_patch14_reg4_dinov2", size=56)


def torchvision_vit():
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=3, num_heads=4, hidden_dim=32, mlp_dim=64
    )
    return multi_head(model.eval(), {"x": images()}, lambda model, inputs: model(**inputs))


def transformer_encoder(**settings):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **settings)
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=not settings).eval()
    return multi_head(model, {"src": torch.randn(2, 7, 32)}, lambda model, inputs: model(**inputs))


def transformer_encoder_causal():
    model, inputs, _ = transformer_encoder(norm_first=True)
    inputs["mask"] = torch.nn.Transformer.generate_square_subsequent_mask(7)
    return multi_head(model, inputs, lambda model, inputs: model(**inputs))


class HandWritten(torch.nn.Module):
    """Attention without a head axis, straight through the functional interface."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 48) for _ in range(3))

    def attend(self, layer, x):
        return layer(x).chunk(3, dim=-1)

    def forward(self, x):
        for layer in self.layers:
            q, k, v = self.attend(layer, x)
            x = x + torch.nn.functional.scaled_dot_product_attention(q, k, value=v, scale=0.7)
        return x


class HandWrittenSoftmax(HandWritten):
    """The same with a softmax of its own."""

    def forward(self, x):
        for layer in self.layers:
            q, k, v = self.attend(layer, x)
            x = x + torch.nn.functional.dropout((0.7 * q @ k.mT).softmax(-1), 0.1, self.training) @ v
        return x


def hand_written_softmax():
    torch.manual_seed(0)
    _, inputs, expected = hand_written()
    torch.manual_seed(0)
    return HandWrittenSoftmax().eval(), inputs, expected


def hand_written():
    torch.manual_seed(0)
    model, x = HandWritten().eval(), torch.randn(2, 5, 16)

    def expected():
        weights, hidden = [], x
        for layer in model.layers:
            q, k, v = model.attend(layer, hidden)
            weights.append((0.7 * q @ k.mT).softmax(-1))
            hidden = hidden + weights[-1] @ v
        return [layer[:, None].detach() for layer in weights]

    return model, {"x": x}, expected


HELPERS = {
    "images",
    "video",
    "huggingface",
    "timm_model",
    "unfused",
    "multi_head",
    "into_dropout",
    "at_places",
    "shifted_windows",
    "swin_layers",
    "timesformer",
}
FAMILIES = {
    name: function
    for name, function in dict(globals()).items()
    if inspect.isfunction(function) and function.__module__ == __name__ and name not in HELPERS
}

# Those whose own weights autograd can reach by another road; not nn.MultiheadAttention's, nor calls placed in a grid.
WITH_GRADIENTS = [
    name
    for name in FAMILIES
    if name not in ("bert_of_two_kernels", "torchvision_vit", "siglip_vision_tower", "vilt")
    and not name.startswith(("transformer_", "hand_written", "timesformer", "swin", "timm_swin", "torchvision_swin"))
]


def coverage() -> str:
    """docs/families.md: what capture is proved on, family by family."""
    from attnflow import capture_batch
    from attnflow.layers import AttentionWeights, MergingLayer, PlacedLayer

    rows = []
    for name, family in FAMILIES.items():
        model, inputs, _ = family()
        trace = capture_batch(model, inputs)[0]
        modules = dict(model.named_modules())
        ways = dict.fromkeys(
            "softmax by hand"
            if isinstance(layer.parts[0].layer if isinstance(layer, PlacedLayer) else layer, AttentionWeights)
            else "nn.MultiheadAttention"
            if isinstance(modules[layer.name], torch.nn.MultiheadAttention)
            else "fused kernel"
            for layer in trace.layers
            if not isinstance(layer, MergingLayer)
        )
        origin = type(model).__module__.split(".")[0].replace("families", "by hand").replace("__main__", "by hand")
        positions = f"{' x '.join(map(str, trace.grid))} patches" if trace.grid else "tokens"
        if "image" in trace.groups:
            positions = f"tokens, {positions}"
        elif any(isinstance(layer, PlacedLayer) for layer in trace.layers):
            positions = f"{positions}, in windows"
        prefix = ", ".join(token for token, role in zip(trace.tokens, trace.roles, strict=True) if role == "prefix")
        causal = "causal" if all(layer.causal for layer in trace.layers) else ""
        cells = (
            name.replace("_", " "),
            f"{origin} `{type(model).__name__}`",
            " and ".join(ways),
            positions,
            prefix,
            causal,
        )
        rows.append("| " + " | ".join(cells) + " |")
    head = """# Families that the tests hold to 1e-5

Written by `python tests/families.py`; a test keeps it true. For every row tests/test_capture.py proves, on a small
random model and a batch of two, that the captured attention equals the model's own (eager attention, an unfused path,
or a hand computation) within 1e-5, that the model's outputs, hooks, modes and configuration are what they were, and
that layers come in forward order; and that gradients of the weights are within 1e-4 of autograd's through the model's
own weights, for all but those inside nn.MultiheadAttention and those by hand, of which one each is proved apart.

Elsewhere are proved: encoder-decoders (T5, BART, Marian, Whisper, nn.Transformer) in tests/test_encoder_decoder.py;
generation (GPT-2, Llama, Mistral, T5, BART, with a cache of keys and without) in tests/test_generation.py; models
inside PEFT, timm's wrapper and accelerate's device maps, and MiniLM and DINOv2-small with their real weights, in
tests/test_capture.py.

| family | model | seen through | positions | prefix tokens | |
| --- | --- | --- | --- | --- | --- |
"""
    return head + "\n".join(rows) + "\n"


if __name__ == "__main__":
    from pathlib import Path

    (Path(__file__).parents[1] / "docs" / "families.md").write_text(coverage())


def harder(model):
    """The model in double precision, with biases and scales that count."""
    torch.manual_seed(0)
    model = model.double()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model
