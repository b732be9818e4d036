"""Model folders.

folders.py    found, read, written whole   hf_config.py    the config.json of a target
placement.py  tensors <-> devices          kinds.py        what a kind of drafter says of itself
packed.py     tensors -> packed arrays     layer_files.py  the config.json of one-layer drafters
parts.py      a model's hash, its parts    places.py      paths, also in object stores
replace.py    files put in the place of earlier ones
gguf_file.py  GGUF files as such folders   gguf_tokenizer.py  the tokenizer in their metadata
token_ids.py  vocabularies, compared       turn_ends.py   ends by a tokenizer's files
casts.py      weights in narrower floats   json_text.py    JSON without NaN and infinity
copies.py     second copies of tensors     config_keys.py  keys that change the mathematics
foreign.py    layouts that are not read
"""
