"""A fixed sample of the sweep: nothing that capture gives is wrong, and nothing crashes."""

import dataclasses
import warnings

import pytest
import torch

from sweep import catalogue
from sweep.judge import judge

SAMPLE = """
BertModel RobertaModel DistilBertModel AlbertModel ElectraModel DebertaV2Model ModernBertModel EsmModel MPNetModel
FunnelModel SqueezeBertModel LongformerModel GPT2Model CodeGenModel GPTNeoXModel GPTJModel OPTModel BloomModel
LlamaModel MistralModel MixtralModel Qwen2Model Qwen3Model Gemma2Model Gemma3TextModel Phi3Model StableLmModel
Olmo2Model CohereModel GraniteModel T5Model T5EncoderModel BartModel PegasusModel MarianModel WhisperModel ViTModel
DeiTModel BeitModel Dinov2Model Dinov2WithRegistersModel CLIPVisionModel CLIPTextModel SiglipVisionModel
SiglipTextModel VideoMAEModel TimesformerModel ViltModel SwinModel Swinv2Model IJepaModel PixtralVisionModel
BertForSequenceClassification GPT2LMHeadModel ViTForImageClassification BartForConditionalGeneration test_vit
test_vit4 vit_tiny_patch16_224 deit_tiny_patch16_224
""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def cases():
    return {case.name: case for case in [*catalogue.transformers_cases(), *catalogue.timm_cases(everything=True)]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
@pytest.mark.parametrize("name", SAMPLE)
def test_capture_is_right_or_refuses(cases, name):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = judge(cases[name])
    finally:
        torch.set_num_threads(threads)
    assert row.verdict in ("equal", "refused"), dataclasses.asdict(row)
