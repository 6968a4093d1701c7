// SPDX-License-Identifier: Apache-2.0
/* torch's tensors as C sees them, through the table that torch publishes for it. What cannot be
 * read here is no error: the functions then say no, without an exception unless they say otherwise.
 */
#ifndef CSA_TORCH_TENSOR_H
#define CSA_TORCH_TENSOR_H

#include <stdbool.h>

#include "dlpack_abi.h"
#include "module.h"

/* (Tensor, Parameter, exchange API capsule, current raw stream of a device) -> None: what the
 * functions below go by. Until then every tensor is unreadable. */
PyObject *csa_py_bind_torch(PyObject *self, PyObject *const *values, Py_ssize_t count);

/* Describe a tensor of torch's own types that has memory on a GPU. What `view` points to lives as
 * long as the tensor. */
bool csa_torch_has_memory(PyObject *tensor, dl_tensor *view);

/* The same of one whose memory holds its values: not a view of another one's negative. */
bool csa_torch_read(PyObject *tensor, dl_tensor *view);

/* Whether writing into it falsifies no gradient. */
bool csa_torch_is_writable(PyObject *tensor);

/* csa_args.dtype, or 0. */
int32_t csa_torch_dtype(const dl_tensor *view);

/* Of two dimensions, with contiguous rows, aligned to its element, and of kv's dtype and device. */
bool csa_torch_is_matrix(const dl_tensor *view, const dl_tensor *kv);

/* Contiguous and aligned 4-byte elements of so many dimensions, on kv's device. */
bool csa_torch_is_array(const dl_tensor *view, const dl_tensor *kv, uint8_t code, int32_t ndim);

/* Bytes of contiguous memory on kv's device, aligned to 16; negative for anything else. */
int64_t csa_torch_scratch_bytes(const dl_tensor *view, const dl_tensor *kv);

/* In elements; a single row has none that counts. */
static inline int64_t csa_torch_row_stride(const dl_tensor *view) {
  return view->shape[0] > 1 ? view->strides[0] : view->shape[1];
}

/* The current stream of a device; may leave an exception. */
bool csa_torch_current_stream(int32_t device, void **stream);

/* A new (rows, columns) tensor of the same dtype and device, uninitialised; NULL with an exception.
 */
PyObject *csa_torch_empty(PyObject *like, int64_t rows, int64_t columns);

#endif
