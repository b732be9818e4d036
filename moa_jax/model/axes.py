"""The key to axis letters; every array carries its shape in its name, as in `x_BTD`.

B  rows of a batch            D  width of the residual stream     V  vocabulary
T  query tokens               H  query heads                      L  target layers
S  rows of a cache            K  key-value heads                  M  memory width: one layer's
N  nodes of a draft tree      G  query heads per key-value head      flattened keys and values
F  width of a feed-forward    E  head size                        R  rounds of a generation
C  capacity: tokens that one row of a generation can hold
J  future positions: steps after the last token whose activations are known
X  several axes joined, or an axis that the code names locally
W  nodes of one level of a draft tree
U  draft vocabulary: the target ids that a drafter may propose, ascending
k  candidates for children of one node
P  tokens of a path           D  in path_BD, emitted_BD: levels of a tree

`length_B` counts verified tokens, whose keys and values are in the caches.
The token at index `length` is the root, which is committed, but not yet in any cache.
"""
