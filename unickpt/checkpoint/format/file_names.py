"""Names of the files and folders of a checkpoint. This module imports nothing."""

from __future__ import annotations

MANIFEST_FILE = "manifest.json"
DATA_FOLDER = "data"
ROWS_FOLDER = "rows"
DATA_FORMAT = "unickpt-data"  # in the header of a data file
MODEL_FOLDER = "model"  # configuration and tokenizer, beside the manifest of a checkpoint that was made of a model
MODEL_TEMPLATES = "additional_chat_templates"  # in it: a tokenizer's additional chat templates
LATEST_FILE = "latest"  # in the save directory
LOCK_FILE = "saving.lock"  # the coordinator locks it during a save
DCP_MARK_FILE = ".metadata"  # by which torch's programs recognise a distributed checkpoint; beside the manifest
MARK_FILE = "metadata.json"  # by which Megatron recognises a distributed checkpoint; beside the manifest
# Files of a transformers model besides weights and code. Files that Trainer adds (state, checkpoints) are not listed.
MODEL_FILES = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*",
    "merges.txt", "*.model", "*.spm", "*.tiktoken", "tekken.json", "bpe.codes", "normalizer.json", "chat_template*",
    "preprocessor_config.json", "processor_config.json", "image_processor_config.json",
    "video_preprocessor_config.json", "audio_tokenizer_config.json",
    "feature_extractor_config.json",
)  # fmt: skip
