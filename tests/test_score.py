"""The score function against the model run by hand, one case at a time."""

import numpy as np
import pytest
import scipy.ndimage
import torch
import transformers

from attnflow import capture
from attnflow.faithfulness.score import image_score, read, remembered, text_score
from classifiers import small_bert, small_vit, sst2, tokenizer

TEXT = "the film is not a masterpiece of cinema"
GRID = (4, 4)
PATCHES = ("prefix", *("patch",) * 16)


@pytest.fixture(scope="module")
def bert():
    return small_bert()


@pytest.fixture(scope="module")
def words():
    return tokenizer()


@pytest.fixture(scope="module")
def inputs(words):
    return dict(words(TEXT, return_tensors="pt"))


@pytest.fixture(scope="module")
def roles(inputs):
    return ("special", *("text",) * (inputs["input_ids"].shape[1] - 2), "special")


def keep_masks(count, cases=40):
    keep = np.random.default_rng(0).random((cases, count)) < np.linspace(0, 1, cases)[:, None]
    keep[0], keep[-1] = False, True
    return keep


@torch.no_grad()
def probability(model, ids, target=1):
    return float(model(torch.tensor([ids])).logits.softmax(-1)[0, target])


@pytest.mark.parametrize("batch_size", [1, 7, 64])
@pytest.mark.parametrize("blank", ["unk", "mask", "pad", "delete"])
def test_text_against_the_model_by_hand(bert, words, inputs, roles, blank, batch_size):
    score = text_score(bert, inputs, roles, 1, tokenizer=words, blank=blank, batch_size=batch_size)
    ids = inputs["input_ids"][0].tolist()
    assert score.positions == tuple(range(1, len(ids) - 1))
    keep = keep_masks(len(score.positions))
    filler = {"unk": words.unk_token_id, "mask": words.mask_token_id, "pad": words.pad_token_id}.get(blank)
    expected = []
    for case in keep:
        kept = [ids[0], *(i if stays else filler for i, stays in zip(ids[1:-1], case, strict=True)), ids[-1]]
        expected.append(probability(bert, [i for i in kept if i is not None]))
    np.testing.assert_allclose(score(keep), expected, atol=2e-6)
    assert np.ptp(expected) > 0.02


def test_special_tokens_may_be_removed_if_asked(bert, words, inputs, roles):
    score = text_score(bert, inputs, roles, 1, tokenizer=words, special=True)
    ids = inputs["input_ids"][0].tolist()
    assert score.positions == tuple(range(len(ids)))
    keep = np.ones((1, len(ids)), dtype=bool)
    keep[0, 0] = False
    np.testing.assert_allclose(score(keep), [probability(bert, [words.unk_token_id, *ids[1:]])], atol=2e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_causal_model_is_read_at_its_last_token(side):
    logits = torch.arange(2 * 3 * 5.0).view(2, 3, 5).sin() * 3
    mask = torch.tensor([[1, 1, 1], [1, 1, 0] if side == "right" else [0, 1, 1]])
    last = logits[[0, 1], [2, 1 if side == "right" else 2]]
    np.testing.assert_allclose(read(logits, 4, "logit", mask), last[:, 4].double())
    np.testing.assert_allclose(read(logits, 4, "logit"), logits[:, -1, 4].double())


def test_deletion_in_a_causal_model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.tensor([[3, 14, 15, 9, 26]])
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer().backend_tokenizer, pad_token="[PAD]")
    score = text_score(model, {"input_ids": ids}, ["text"] * 5, 7, tokenizer=words, blank="delete")
    keep = np.array([[0, 1, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0]], dtype=bool)
    with torch.no_grad():
        expected = [model(ids[:, case]).logits[0, -1].softmax(-1)[7].item() for case in torch.from_numpy(keep)]
    np.testing.assert_allclose(score(keep), expected, atol=1e-7)
    with pytest.raises(ValueError, match="deletes every token"):
        score(np.zeros((1, 5), dtype=bool))
    with pytest.raises(ValueError, match="no mask token: choose blank from pad, delete"):
        text_score(model, {"input_ids": ids}, ["text"] * 5, 7, tokenizer=words, blank="mask")


def test_readings():
    logits = torch.tensor([[1.0, 3.0], [2.0, 0.0]])
    np.testing.assert_allclose(read(logits, 1, "probability"), logits.double().softmax(-1)[:, 1])
    np.testing.assert_allclose(read(logits, 1, "logit"), [3, 0])
    np.testing.assert_allclose(read(logits, 1, "correct"), [1, 0])
    np.testing.assert_allclose(read(logits, lambda output: output.sum(1), "probability"), [4, 2])
    tiny = read(torch.tensor([[20.0, 0.0]]), 0, "probability")
    assert 0 < 1 - tiny.item() < 1e-8  # a difference that single precision does not hold


@pytest.fixture(scope="module")
def pixels():
    return torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("blank", ["zero", "mean", "blur"])
def test_images_against_the_model_by_hand(pixels, blank):
    model = small_vit()
    score = image_score(model, pixels, PATCHES, GRID, 2, blank=blank, batch_size=7)
    assert score.positions == tuple(range(1, 17))
    image = pixels[0].numpy()
    canvas = {
        "zero": np.zeros_like(image),
        "mean": np.broadcast_to(image.mean((1, 2), keepdims=True), image.shape),
        "blur": np.stack([scipy.ndimage.gaussian_filter(c, 8, mode="nearest", truncate=3) for c in image]),
    }[blank]
    keep = keep_masks(16)
    expected = []
    for case in keep:
        shown = image.copy()
        for patch in np.nonzero(~case)[0]:
            row, column = 8 * (patch // 4), 8 * (patch % 4)
            place = np.s_[:, row : row + 8, column : column + 8]
            shown[place] = canvas[place]
        with torch.no_grad():
            expected.append(float(model(torch.from_numpy(shown)[None]).logits.softmax(-1)[0, 2]))
    np.testing.assert_allclose(score(keep), expected, atol=2e-6)
    assert np.ptp(expected) > 0.02


def test_the_model_is_left_as_it_was(bert, words, inputs, roles):
    before = {name: value.clone() for name, value in inputs.items()}
    text_score(bert, inputs, roles, 1, tokenizer=words)(keep_masks(len(roles) - 2))
    assert all(parameter.grad is None for parameter in bert.parameters())
    assert all(torch.equal(inputs[name], value) for name, value in before.items())


def test_a_target_that_mixes_the_cases_or_is_not_finite_is_refused(bert, words, inputs, roles):
    keep = keep_masks(len(roles) - 2)
    mixing = text_score(bert, inputs, roles, lambda output: output.logits.sum(), tokenizer=words)
    with pytest.raises(ValueError, match="one score per case: 40"):
        mixing(keep)
    broken = text_score(bert, inputs, roles, lambda output: output.logits[:, 0] / 0, tokenizer=words)
    with pytest.raises(ValueError, match="not finite in 40 of 40 cases"):
        broken(keep)


def test_every_case_is_asked_once():
    asked = []

    def score(keep):
        asked.extend(keep.tolist())
        return keep.sum(1).astype(float)

    recall = remembered(score)
    keep = keep_masks(9)
    np.testing.assert_array_equal(recall(keep), keep.sum(1))
    np.testing.assert_array_equal(recall(keep[::-1]), keep.sum(1)[::-1])
    assert len(asked) == len(np.unique(keep, axis=0))


def test_what_does_not_fit_is_refused(bert, words, inputs, roles, pixels):
    score = text_score(bert, inputs, roles, 1, tokenizer=words)
    for wrong in (np.ones((2, 3), dtype=bool), np.ones((2, len(score.positions)))):
        with pytest.raises(ValueError, match="a keep-mask must be booleans"):
            score(wrong)
    with pytest.raises(ValueError, match="the ids of one text with 3 tokens"):
        text_score(bert, inputs, roles[:3], 1, tokenizer=words)
    with pytest.raises(ValueError, match="blank 'zero' is unknown for text"):
        text_score(bert, inputs, roles, 1, tokenizer=words, blank="zero")
    with pytest.raises(ValueError, match="reading 'odds' is unknown"):
        text_score(bert, inputs, roles, 1, tokenizer=words, reading="odds")
    with pytest.raises(ValueError, match="blank 'unk' is unknown for images"):
        image_score(small_vit(), pixels, PATCHES, GRID, 1, blank="unk")
    with pytest.raises(ValueError, match="divides into 5 x 5 patches"):
        image_score(small_vit(), pixels, PATCHES, (5, 5), 1)
    everything = np.ones((1, len(score.positions)), dtype=bool)
    with pytest.raises(ValueError, match="target 3 is out of range: the model has 3 classes, 0 to 2"):
        text_score(bert, inputs, roles, 3, tokenizer=words)(everything)
    with pytest.raises(ValueError, match="returns no logits but BaseModelOutput"):
        text_score(bert.bert, inputs, roles, 1, tokenizer=words)(everything)
    with pytest.raises(ValueError, match="a single logit, so its probability is always 1"):
        read(torch.zeros(2, 1), 0, "probability")


def test_a_real_classifier_leans_on_the_words_that_say_so(data):
    model, words = sst2(data)
    inputs = dict(words("a boring film with a wonderful ending", return_tensors="pt"))
    trace = capture(model, inputs, tokenizer=words)
    score = text_score(model, inputs, trace.roles, 1, tokenizer=words)
    removable = [trace.tokens[place] for place in score.positions]
    keep = np.ones((3, len(removable)), dtype=bool)
    keep[1, removable.index("boring")] = keep[2, removable.index("wonderful")] = False
    whole, without_boring, without_wonderful = score(keep)
    assert without_boring > whole > without_wonderful
