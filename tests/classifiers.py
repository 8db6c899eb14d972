"""Classifiers for the tests of faithfulness: SST-2 on the packaged MiniLM, and two small ones with random weights."""

import torch
import transformers

from attnflow.capturing import demo
from attnflow.studies.sst2 import ADAPTER, classifier


def sst2(data):
    """(model, tokenizer): MiniLM with the adapter at hand merged in; class 0 is negative."""
    return classifier(data / "adapters" / ADAPTER)


def sst2_examples(data, count):
    """The first (sentence, label) pairs of the development set."""
    lines = (data / "sst2" / "dev.tsv").read_text().splitlines()[:count]
    return [(text, int(label)) for text, label in (line.rsplit("\t", 1) for line in lines)]


def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(demo.text_folder())


def small_bert():
    """A BERT of two layers and three classes, the same at every call."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    return sharpened(transformers.BertForSequenceClassification(config))


def small_vit():
    """A ViT of two layers, three classes and 4 x 4 patches of 8 pixels, the same at every call."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
        num_labels=3,
    )
    return sharpened(transformers.ViTForImageClassification(config))


def sharpened(model):
    """Weights large enough that every token changes the prediction."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10)
    return model.eval()
