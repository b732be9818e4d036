"""Model folders.

folders.py    finds, reads, writes folders     hf_config.py    config.json of a target
placement.py  tensors <-> devices              kinds.py        registry entry of a drafter kind
packed.py     tensors -> packed arrays         layer_files.py  config.json of one-layer drafters
parts.py      model hash, partial folders      places.py       paths, also in object stores
replace.py    replaces the files of a folder
gguf_file.py  GGUF files as model folders      gguf_tokenizer.py  tokenizer of a GGUF file
token_ids.py  compares vocabularies            turn_ends.py    end tokens of a tokenizer's files
casts.py      casts to narrower floats         json_text.py    JSON without NaN and infinity
copies.py     compares duplicate tensors       config_keys.py  unsupported keys of config.json
foreign.py    unsupported tensor layouts
"""
