"""Operations on arrays, below the models and above the kernels.

Dimension letters, used in every shape comment:

  S  sequences in a step        T  packed tokens           B  query tiles, Q tokens in each
  H  query heads                K  KV heads                G  H // K, query heads per KV head
  D  head_dim                   E  hidden size             F  intermediate size
  N  blocks in the pool         P  block_size              M  block table width
  L  layers                     V  vocabulary
"""
