"""Parameters counted from the catalogue's shapes are those of the published files, to the last one.

`total` of the weights' index on the Hugging Face Hub (https://huggingface.co/api/models/REPOSITORY, field safetensors),
as public repositories quote it. Files also hold values that no optimizer trains, which are listed with their shape.
"""

from dataclasses import replace

import pytest
from tests.every_member import check_every

from meshwright.catalog.lookup import model
from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row

TRAINED_ONLY = {
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "falcon3-7b": 7_455_550_464,
    "falcon3-10b": 10_305_653_760,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "nemotron3-nano": 31_577_937_344,
    "nemotron3-super": 123_611_012_096,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "phi3-mini": 3_821_079_552,
    "phi4": 14_659_507_200,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-next-80b-a3b": 81_324_862_720,
}

LLAMA4_VISION = 871_932_416  # encoder of 34 layers and its projector, by the shapes of vision_config
MTP_COPIES = 2  # embedding and head, which the prediction module's layer has again
OTHER_VALUES = {
    # total, and what of it is not trained or stands twice: a bias of the router for each expert and layer, frequencies
    # of rotary positions, the experts of every token of layers that choose by a table, copies for the prediction module
    "llama4-scout": (108_641_793_536, LLAMA4_VISION),
    "llama4-maverick": (401_583_781_376, LLAMA4_VISION),
    "llama2-7b": (6_738_417_664, 32 * 64),
    "llama2-13b": (13_015_866_880, 40 * 64),
    "kimi-linear-48b-a3b": (49_122_681_728, 26 * 256),
    "minimax-m2": (228_689_764_864, 62 * 256),
    "deepseek-v3": (684_489_845_504, 59 * 256 + MTP_COPIES * 129_280 * 7168),
    "deepseek-v3.2": (685_355_329_792, 59 * 256 + MTP_COPIES * 129_280 * 7168),
    "deepseek-v4-flash": (290_944_616_402, 41 * 256 + 3 * 129_280 * 6),
    "deepseek-v4-pro": (1_598_839_674_782, 59 * 384 + 3 * 129_280 * 6),
    "glm-4.5": (358_337_791_296, 90 * 160 + MTP_COPIES * 151_552 * 5120),
    "glm-4.5-air": (110_468_824_832, 46 * 128 + MTP_COPIES * 151_552 * 4096),
    "glm-5": (753_864_139_008, 76 * 256),
}

TEXT_ONLY = {
    # language part of a model that also reads images, as llama.cpp counts its tensors (n_params)
    "qwen3.5-4b": 4_205_751_296,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
}


def counted(name: str) -> int:
    return round(float(count_parameters(model_row(model(name))).total))


def test_counted_parameters_are_those_of_the_published_files() -> None:
    def check(name: str, total: int) -> None:
        assert counted(name) == total

    check_every((TRAINED_ONLY | TEXT_ONLY).items(), lambda case: check(*case))


@pytest.mark.parametrize(("name", "total", "others"), [(n, *values) for n, values in OTHER_VALUES.items()])
def test_files_hold_besides_only_what_is_listed(name: str, total: int, others: int) -> None:
    assert counted(name) + others == total


def test_a_prediction_module_in_no_file_is_not_counted_as_published() -> None:
    """Nemotron 3.5 Lightning: its published files end with the last layer."""
    without = replace(model("nemotron3.5-lightning"), num_mtp_layers=0)
    assert round(float(count_parameters(model_row(without)).total)) == 31_577_937_344
