"""Models of image and text on the command line: tiny models of real families with their own processors."""

import json

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import attnflow
from attnflow.capturing import image_text, structure
from test_cli import run, width

__all__ = ["run"]

# A processor of transformers turns a tensor into an array in the way of old.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:transformers")

QUESTION = "What is on the table?"
LINES = [QUESTION, "The keys to the cabinet are on the table.", "a cat , two horses and a dog", "User : Answer :"]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "<fake_token_around_image>", "<global-img>"]
SPECIAL += ["<end_of_utterance>", "<start_of_image>", "<end_of_image>"]
TEXT = {
    "vocab_size": 160,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
IMAGE = SPECIAL.index("<image>")
CHAT = (
    "{{ bos_token }}{% for turn in messages %}User: {% for part in turn.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %} Answer:"
)


def trained_tokenizer(**more):
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(LINES, trainers.WordLevelTrainer(special_tokens=SPECIAL))
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **more}
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=SPECIAL[4:], **named)


def llava(**how):
    vision = hf.CLIPVisionConfig(**VISION)
    config = hf.LlavaConfig(vision_config=vision, text_config=hf.LlamaConfig(**TEXT), image_token_id=IMAGE)
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    settings = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    pictures = hf.CLIPImageProcessor(**(sizes | how))
    processor = hf.LlavaProcessor(pictures, trained_tokenizer(), **settings, chat_template=CHAT)
    return hf.LlavaForConditionalGeneration(config), processor


def llava_uncropped():
    return llava(size={"height": 32, "width": 32}, do_center_crop=False)


def llava_padded():
    model, processor = llava()
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    processor.image_processor = hf.LlavaImageProcessor(**sizes, do_pad=True)
    return model, processor


def idefics3():
    """Four patches to a token, and tiles beside the whole photograph unless that is turned off."""
    text = hf.LlamaConfig(**TEXT)
    config = hf.Idefics3Config(vision_config=VISION, text_config=text, image_token_id=IMAGE, scale_factor=2)
    edges = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    pictures = hf.Idefics3ImageProcessor(**edges)
    processor = hf.Idefics3Processor(pictures, trained_tokenizer(), image_seq_len=4, chat_template=CHAT)
    return hf.Idefics3ForConditionalGeneration(config), processor


def paligemma():
    """The prompt is read in both directions, the answer is not; no chat template."""
    vision = hf.SiglipVisionConfig(**VISION)
    text = hf.GemmaConfig(**TEXT, head_dim=8)
    sizes = {"projection_dim": 32, "hidden_size": 32}
    config = hf.PaliGemmaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, **sizes)
    pictures = hf.SiglipImageProcessor(size={"height": 32, "width": 32})
    pictures.image_seq_length = 16
    return hf.PaliGemmaForConditionalGeneration(config), hf.PaliGemmaProcessor(pictures, trained_tokenizer())


GRIDS = {llava: (4, 4), llava_uncropped: (4, 4), idefics3: (2, 2), paligemma: (4, 4)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a family's model and processor, saved once."""
    saved = {}

    def folder(family):
        if family not in saved:
            torch.manual_seed(0)
            hf.utils.logging.disable_progress_bar()
            saved[family] = tmp_path_factory.mktemp(family.__name__)
            for part in family():
                part.save_pretrained(saved[family])
        return saved[family]

    return folder


@pytest.fixture(scope="module")
def picture():
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.long
@pytest.mark.parametrize("family", GRIDS)
def test_the_command_line_explains_what_was_written(run, folder, tmp_path, shipped, family):
    photo, name = shipped / "images" / "horses.jpg", folder(family)
    asked = ["image", photo, "--model", name, "--text", QUESTION, "-q"]
    code, out, err = run(*asked, "--generate", 4, "--json", "-o", tmp_path / "overlay.png")
    assert (code, err) == (0, "")
    found = json.loads(out)
    rows, columns = GRIDS[family]
    assert found["grid"] == [rows, columns]
    start = found["tokens"].index("0,0")
    patches = [f"{row},{column}" for row in range(rows) for column in range(columns)]
    assert found["tokens"][start : start + rows * columns] == patches
    assert "table?" in found["tokens"]
    assert len(found["queries"]) == 4
    assert found["query_tokens"] == found["tokens"][-4:]
    assert width(tmp_path / "overlay.png") > 500
    code, out, err = run(*asked)
    assert (code, err) == (0, "")
    assert "table?" in out
    code, out, _ = run(*asked, "--json")
    last = json.loads(out)
    assert last["queries"] == [len(last["tokens"]) - 1]


@pytest.mark.parametrize("family", GRIDS)
def test_weights_are_those_of_each_step_of_generation(folder, picture, family):
    """Against the eager model's own attention of the language model, while it writes token by token."""
    loaded = image_text.load(str(folder(family)))
    inputs = loaded.prepare(picture, QUESTION)
    tower = structure.reader(loaded.model, inputs)
    eager = hf.AutoModelForImageTextToText.from_pretrained(folder(family), attn_implementation="eager").eval()
    settings = {"output_attentions": True, "return_dict_in_generate": True, "do_sample": False}
    for count in (1, 4):
        trace = attnflow.capture(loaded.model, inputs, tower=tower, generate=count)
        own = eager.generate(**inputs, **settings, max_new_tokens=count)
        start = inputs["input_ids"].shape[1]
        assert trace.generated_from == start
        assert len(own.attentions) == len(trace.tokens) - start == count
        for layer, prompt in zip(trace.layers, own.attentions[0], strict=True):
            seen = layer.attention()[:, :start, :start]
            torch.testing.assert_close(seen, prompt[0], atol=1e-5, rtol=0)
        for step, of_layers in enumerate(own.attentions[1:]):
            for layer, weights in zip(trace.layers, of_layers, strict=True):
                row = layer.attention([start + step])[:, 0, : start + step + 1]
                torch.testing.assert_close(row, weights[0, :, -1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", GRIDS)
def test_image_tokens_stand_at_their_patches(folder, family):
    """Without layers in the vision tower that mix patches, one block of pixels changes the one token of its place."""
    loaded = image_text.load(str(folder(family)))
    inputs = loaded.prepare(Image.new("RGB", (32, 32), "grey"), QUESTION)
    tower = structure.reader(loaded.model, inputs)
    trace = attnflow.capture(loaded.model, inputs, tower=tower)
    rows, columns = GRIDS[family]
    for name, module in loaded.model.named_modules():
        if name.endswith("self_attn") and tower not in name:
            module.out_proj.weight.data.zero_()
    fed = []
    layer = loaded.model.get_submodule(tower).layers[0]
    layer.register_forward_pre_hook(lambda _, args: fed.append(args[0][0].clone()))
    size = 32 // rows
    for row, column in [(0, 0), (0, columns - 1), (rows - 1, 1)]:
        pixels = inputs["pixel_values"].clone()
        pixels[..., size * row : size * (row + 1), size * column : size * (column + 1)] += torch.rand(size, size)
        with torch.no_grad():
            loaded.model(**inputs)
            loaded.model(**inputs | {"pixel_values": pixels})
        before, after = fed[-2:]
        changed = (before - after).abs().amax(-1) > 1e-6
        assert [trace.tokens[position] for position in changed.nonzero()[:, 0]] == [f"{row},{column}"]


def test_the_picture_is_cropped_and_padded_as_the_model_sees_it(folder):
    photo = Image.new("RGB", (300, 100), "red")
    photo.paste("blue", (100, 0, 200, 100))
    cropped = image_text.load(str(folder(llava))).seen(photo)
    assert np.abs(np.subtract(cropped.size, 100)).max() <= 4
    assert np.asarray(cropped)[5:-5, 5:-5].reshape(-1, 3).max(0).tolist() == [0, 0, 255]
    padded = image_text.load(str(folder(llava_padded))).seen(photo)
    assert np.abs(np.subtract(padded.size, 300)).max() <= 8
    assert not np.asarray(padded)[:90].any()
    assert np.asarray(padded)[120:180].any((1, 2)).all()
    for family in (llava_uncropped, idefics3, paligemma):
        whole = image_text.load(str(folder(family))).seen(photo)
        assert np.abs(np.subtract(whole.size, photo.size)).max() <= 4


def test_the_tower_is_found_by_what_it_reads(folder, picture):
    from families import FAMILIES
    from test_capture import clip

    for family, name in ((llava, "model.language_model"), (idefics3, "model.text_model")):
        loaded = image_text.load(str(folder(family)))
        assert structure.reader(loaded.model, loaded.prepare(picture, QUESTION)) == name
    model, inputs, _ = FAMILIES["bert"]()
    assert structure.reader(model, inputs) is None
    model, inputs = clip()
    with pytest.raises(ValueError, match=r"vision_model and text_model, of which not one reads all the others"):
        structure.reader(model, inputs)


def test_a_photograph_in_pieces_is_refused(folder, picture):
    """A processor without the option to give the whole alone."""
    loaded = image_text.load(str(folder(llava)))
    pictures = loaded.processor.image_processor
    loaded.processor.image_processor = lambda images, **how: pictures([images, images], **how)
    with pytest.raises(ValueError, match="cuts the photograph into 2 pieces"):
        loaded.seen(picture)
    loaded.processor.image_processor = lambda images, **how: {"pixel_values": torch.zeros(24, 192)}
    with pytest.raises(ValueError, match="single patches, whose places are not known"):
        loaded.seen(picture)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Folders of models that take no image, no text, or have no weights for what they write."""
    torch.manual_seed(0)
    hf.utils.logging.disable_progress_bar()
    made = {name: tmp_path_factory.mktemp(name) for name in ("text", "vision", "headless", "deeper")}
    hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT)).save_pretrained(made["text"])
    trained_tokenizer().save_pretrained(made["text"])
    hf.ViTModel(hf.ViTConfig(**VISION)).save_pretrained(made["vision"])
    hf.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(made["vision"])
    model, processor = llava()
    model.model.save_pretrained(made["headless"])
    processor.save_pretrained(made["headless"])
    model.save_pretrained(made["deeper"])
    processor.save_pretrained(made["deeper"])
    model.config.vision_config.num_hidden_layers += 1
    model.config.save_pretrained(made["deeper"])
    return made


REFUSED = {
    "no vision part": ("text", ["--text", QUESTION], "it does not take both an image and a text"),
    "no text part": ("vision", ["--text", QUESTION], "it does not take both an image and a text"),
    "no head": ("headless", ["--text", QUESTION], "it was not trained to write: it has no weights for lm_head"),
    "no layer": ("deeper", ["--text", QUESTION], "weights, which would be drawn at random: model.vision_tower."),
    "no folder": (None, ["--model", "nowhere", "--text", QUESTION], "cannot load a model of image and text"),
    "no model": (None, ["--text", QUESTION], "--text needs --model"),
    "no question": ("vision", ["--generate", "3"], "--generate needs --text"),
    "nothing said": ("whole", [], "LlavaModel reads a text beside the image; say which with --text"),
    "nothing asked": ("whole", ["--text", " "], "the text is empty"),
    "nothing to write": ("whole", ["--text", QUESTION, "--generate", "0"], "--generate takes a number of tokens"),
    "a size": ("whole", ["--text", QUESTION, "--size", "32x32"], "--size is for vision models"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_asked_is_refused(run, folder, others, picture, tmp_path, case):
    which, arguments, message = REFUSED[case]
    picture.save(tmp_path / "photo.png")
    name = folder(llava) if which == "whole" else others.get(which)
    model = [] if name is None else ["--model", name]
    code, out, err = run("image", tmp_path / "photo.png", *model, *arguments, "-q")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
