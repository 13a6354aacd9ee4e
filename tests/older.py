"""What other releases of transformers lack, refuse or get wrong: reasons to skip for `make floors` and `make newest`.

Only a test that failed is looked up here, and never with the pinned version.
"""

import re
from importlib.metadata import version

from packaging.version import Version

OLDER = Version(version("transformers")) < Version("5.23")
NEWER = Version(version("transformers")) >= Version("5.24")

_MISSING = re.compile(
    r"module transformers\S* has no attribute|cannot import name|No module named 'transformers\."
    r"|No module named 'trl'|has no attribute 'activate_past_recording'"
    r"|unexpected keyword argument 'position_ids_start'|removed in Click 9"
)
_FAULTS = {  # (test, part of its parameters): what transformers 5.10.1 does
    ("test_registry_gives_the_forms_that_the_model_uses", "Dbrx"): "its router has another width than the model",
    ("test_registry_gives_the_forms_that_the_model_uses", "Qwen3"): "without recurrent layers it runs with no cache",
    ("test_an_interceptor_that_only_watches_changes_no_bit", "Doge"): "under SDPA Doge reads later tokens",
    ("test_a_model_that_looks_at_its_mask_stays_causal", "sdpa"): "under SDPA Doge reads later tokens",
    ("test_clean_caches_raise_no_alarm", "Mamba2"): "a second chunk forgets the first",
    ("test_clean_caches_raise_no_alarm", "Qwen3Next"): "recurrent layers read padding on the left",
    ("test_clean_models_raise_no_alarm", "RoFormer"): "its decoder reads later tokens",
    ("test_clean_models_raise_no_alarm", "BigBird"): "its decoder reads later tokens",
    ("test_clean_models_raise_no_alarm", "RemBert"): "its decoder reads later tokens",
    ("test_clean_models_raise_no_alarm", "MegatronBert"): "its decoder reads later tokens",
    ("test_clean_models_raise_no_alarm", "NemotronH"): "later tokens move earlier outputs by 1e-4",
    ("test_recurrent_and_hybrid_models_are_chains", "NemotronH"): "later tokens move earlier outputs by 1e-4",
    ("test_why_of_cross_attention", ""): "T5 has no attention interface",
    ("test_documents_are_declared_whatever_mixes_them", "OlmoHybrid"): "its convolution is a module of its own",
    ("test_families_raise_no_alarm", "LightGlue"): "its projection does not fit a small model",
    ("test_models_refused_in_words", "keys mixed"): "the class that mixes its keys is missing",
    ("test_it_is_refused_in_words", "experts in one matrix"): "the config of Dbrx refuses its own parts",
    ("test_lora_beside_a_trained_base", ""): "PEFT 0.18 calls a wrapped embedding without its input",
    ("test_a_decoder_is_as_it_was_until", "Qwen3Next"): "without recurrent layers it runs with no cache",
    ("test_gradient_checkpointing_repeats_its_own_pass", ""): "a pass that is over still counts, and is refused",
    ("test_models_that_are_refused_are_as_before", "T5"): "T5 has no attention interface, and is refused as that",
    ("test_every_registered_family_is_in_the_zoo", ""): "some families of the zoo are missing",
    ("", "ModernBert"): "a config changes the default of its class, and the next one is refused",
}

_NEWER_FAULTS = {  # (test, part of its parameters, part of what its failure says): what transformers 5.24 does
    ("", "", "CausalLMOutputWithPast' object has no attribute 'image_outputs'"): "Llama 4 refuses pictures",
    ("test_models_without_the_", "GPTJ", "DID NOT RAISE"): "GPT-J has the attention interface",
    ("test_weights_that_a_model_returns_rounded", "", "DID NOT RAISE"): "GPT-J has the attention interface",
    (
        "test_a_sink_for_each_query_is_refused",
        "",
        "several lists of layers",
    ): "Inkling 2 attends to the outputs of its layers, too",
    (
        "test_models_refused_in_words",
        "keys mixed",
        "there are 2 keys",
    ): "Inkling 2 attends to the outputs of its layers, too",
}


def reason(test: str, parameters: str, error: BaseException) -> str | None:
    """Why a failure is expected of this transformers, or None."""
    for (name, part, message), fault in _NEWER_FAULTS.items() if NEWER else ():
        if test.startswith(name) and part in parameters and message in str(error):
            return f"transformers {version('transformers')}: {fault}"
    if not OLDER:
        return None
    if type(error).__name__ in ("UnsupportedArchitecture", "NotBuilt") or _MISSING.search(str(error)):
        return f"transformers {version('transformers')}: {error}"
    for (name, part), fault in _FAULTS.items():
        if test.startswith(name) and part in parameters:
            return f"transformers {version('transformers')}: {fault}"
    return None
