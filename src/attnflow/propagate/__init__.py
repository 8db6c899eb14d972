"""How edges are carried down to the input: raw (one layer), rollout (multiply and add), flow (maximum flow).

All take the edges (query, key) of the explained layer's queries, and what lies below it, layer 0 first; they return
scores (query, input token).
"""
