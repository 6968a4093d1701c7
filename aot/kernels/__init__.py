# SPDX-License-Identifier: Apache-2.0
"""Device code in CuTe-DSL.

A kernel and its `entry` a file: forward and backward, for windows that a thread holds;
backward_buffered, for those of them whose next row waits in shared memory; forward_long and
backward_long, for windows that a block's warps share; finish, backward's second launch. What they
compute stands in pooling and gradients, and for long windows in forward_long, softmax_row and
row_gradients. presumed_row, warp_ape, warp_buffer and warp_gradients are backward_buffered's own;
block_layout names the parts of backward_long, thread what they ask of a thread. Below lie pair, kv
and score or their gradients; window and window_long, a row's window as a thread and as a warp sees
it; segments, which finds where rows start, with prefix_search; and memory, bf16, arithmetic and
ptx, which know nothing of the operation.

Words: a row's or a segment's block is `ratio` tokens, any other block is one of threads. A tile is
the columns, or the rows, that a block of threads works on at a time. `first` and `last` say whether
a row's block is its segment's first or last. Pooled tokens are those in a computed row's block. A
guess is where a search begins to look among the prefixes; a token is presumed where a block is
loaded from before its row is found.
"""
