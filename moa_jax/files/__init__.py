"""Model folders.

model_folder.py   finds, reads, writes folders  tensor_reader.py   tensors by name, one at a time
whole_files.py    files written whole, or not   hf_config.py       config.json of a target
prequantized.py   matrices in eight bits
device_loader.py  tensors <-> devices           registry.py        entry of a drafter kind
packed.py         tensors -> packed arrays      layer_files.py     one-layer drafters' configs
client_files.py   what a split client holds     paths.py           paths, also in object stores
replace.py        replaces a folder's files     json_text.py       JSON without NaN and infinity
gguf.py           GGUF files as model folders   gguf_tokenizer.py  tokenizer of a GGUF file
token_ids.py      compares vocabularies         turn_ends.py       end tokens of a tokenizer
casts.py          casts to narrower floats      copies.py          compares duplicate tensors
config_keys.py    unsupported config keys       foreign.py         unsupported tensor layouts
model_card.py     README.md of a drafter        hub.py             uploads to the hub
families.py       names of target families      pickles.py         pickled weights -> safetensors
"""
