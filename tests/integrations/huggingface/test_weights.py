"""The weights that a `Trainer` resumes, of models whose checkpoints have them by other names."""

import language_models as lm
import pytest
import torch
import trainers
import transformers as hf

from odb_nodes import StateError
from odb_nodes.integrations.huggingface import ODBTrainer

pytestmark = pytest.mark.filterwarnings(trainers.OF_TRANSFORMERS)

SIZES = {
    "vocab_size": lm.VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
EXPERTS = {**SIZES, "num_key_value_heads": 2, "num_experts_per_tok": 2}
QWEN = {"moe_intermediate_size": 8, "head_dim": 8}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
TEXT = {**SIZES, "num_key_value_heads": 2, "rope_scaling": ROPE}
SIGHT = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4}
PATCHES = {"image_size": 8, "patch_size": 4, "num_labels": 3}
PIXELS = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))

MODELS = {
    "MixtralForCausalLM": {**EXPERTS, "num_local_experts": 4},
    "Qwen3MoeForCausalLM": {**EXPERTS, **QWEN, "num_experts": 4},
    "OlmoeForCausalLM": {**EXPERTS, "num_experts": 4},
    "ViTForImageClassification": {**SIZES, **PATCHES},
    "Qwen2VLForConditionalGeneration": {"text_config": TEXT, "vision_config": SIGHT},
    "LlamaForCausalLM": {**SIZES, "tie_word_embeddings": True},
    "GPT2LMHeadModel": {"vocab_size": lm.VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2},
}


def model_of(name, seed, **options):
    """A small model whose weights depend on the seed."""
    torch.manual_seed(seed)
    kind = getattr(hf, name)
    return kind(kind.config_class(**{**MODELS[name], **options}))


def collate_images(samples):
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {
        "pixel_values": torch.stack([sample["pixel_values"] for sample in samples]),
        "labels": labels,
    }


def trainer_of(folder, model):
    data, arguments, odb = [lm.sample_of(index) for index in range(40)], {}, {}
    if isinstance(model, hf.ViTForImageClassification):
        data = [{"pixel_values": pixels, "labels": n % 3} for n, pixels in enumerate(PIXELS)]
        arguments, odb = {"data_collator": collate_images}, {"observe": lambda _: 16}
    args = trainers.arguments(folder, max_steps=4, save_steps=2)
    return ODBTrainer(model, args, train_dataset=data, odb=trainers.config(**odb), **arguments)


def assert_same(model, expected):
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def resume(folder, model):
    trainer = trainer_of(folder, model)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return trainer.model


def adapted(seed):
    import peft

    base, config = model_of("LlamaForCausalLM", seed=0), peft.LoraConfig(task_type="CAUSAL_LM")
    torch.manual_seed(seed)
    return peft.get_peft_model(base, config)


@pytest.mark.parametrize("name", [*MODELS, "an adapter"])
def test_a_resumed_model_has_all_its_weights(tmp_path, name):
    def make(seed):
        return adapted(seed) if name == "an adapter" else model_of(name, seed)

    whole = trainer_of(tmp_path, make(seed=0))
    whole.train()
    assert_same(resume(tmp_path, make(seed=1)), whole.model)


@pytest.mark.parametrize("shard, kind", [("50GB", torch.float32), ("5KB", torch.bfloat16)])
def test_the_best_model_has_all_its_weights(tmp_path, shard, kind):
    best = model_of("MixtralForCausalLM", seed=0).to(kind)
    best.lm_head.float()  # as models keep some weights in a wider type
    best.save_pretrained(tmp_path, max_shard_size=shard)
    trainer = trainer_of(tmp_path, model_of("MixtralForCausalLM", seed=1).to(kind))
    trainer.model.lm_head.float()
    trainer.state.best_model_checkpoint = str(tmp_path)
    trainer._load_best_model()
    assert_same(trainer.model, best)


@pytest.mark.parametrize("saved, layers, key", [(1, 2, "missing from it"), (2, 1, "in it alone")])
@pytest.mark.parametrize("name", ["MixtralForCausalLM", "LlamaForCausalLM"])
def test_weights_without_a_counterpart_are_refused(tmp_path, name, saved, layers, key):
    trainer_of(tmp_path, model_of(name, seed=0, num_hidden_layers=saved)).train()
    model = model_of(name, seed=0, num_hidden_layers=layers)
    with pytest.raises(StateError, match=rf"are {key}, .*layers\.1.*{name}.from_pretrained"):
        resume(tmp_path, model)


def test_a_module_with_other_weights_is_refused(tmp_path):
    whole = trainers.make_trainer(tmp_path, max_steps=2, save_steps=2)
    whole.train()
    larger = lm.Normalizing()
    larger.more = torch.nn.Linear(2, 2)
    with pytest.raises(StateError, match=r"2 are missing from it, such as `more.bias`"):
        trainers.make_trainer(tmp_path, model=larger).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-2")
        )
