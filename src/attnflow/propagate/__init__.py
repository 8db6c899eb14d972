"""How edges are carried down to the input: raw (one layer), rollout (multiply and add), flow (maximum flow).

All three take the rows (query, key) of the layer that is explained and the transitions (query, key) of the layers
below it, layer 0 first, and return scores (query, input token).
"""
