// SPDX-License-Identifier: Apache-2.0
/* The usual call on torch's tensors, without Python in between: read, checked and launched here.
 *
 * Only what certainly passes every check of calls.py and checks.py is served. For anything else the
 * functions return None, and the array operations do the call and say what is wrong with it. */
#include <stdbool.h>

#include "dlpack_abi.h"
#include "module.h"
#include "torch_tensor.h"

enum { COUNT_MAX = INT32_MAX };

/* An `int` of [low, high]; None and numbers of other types are for the array operations. */
static bool integer(PyObject *object, int64_t low, int64_t high, int64_t *number) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow;
  *number = PyLong_AsLongAndOverflow(object, &overflow);
  return overflow == 0 && *number >= low && *number <= high;
}

/* The five inputs, ratio and coff. */
static bool read_inputs(PyObject *const *objects, PyObject *ratio, PyObject *coff,
                        struct csa_call *call, dl_tensor *kv) {
  csa_args *a = &call->args;
  dl_tensor score, ape, starts, sums;
  int64_t number;
  if (!integer(ratio, 1, COUNT_MAX, &number)) return false;
  a->ratio = (int32_t)number;
  if (!integer(coff, 1, 2, &number)) return false;
  a->coff = (int32_t)number;
  if (!csa_torch_read(objects[0], kv) || !csa_torch_is_matrix(kv, kv)) return false;
  int64_t tokens = kv->shape[0], width = kv->shape[1];
  a->dtype = csa_torch_dtype(kv);
  if (a->dtype == 0 || tokens > COUNT_MAX || width == 0 || width % a->coff != 0) return false;
  if (!csa_torch_read(objects[1], &score) || !csa_torch_is_matrix(&score, kv) ||
      score.shape[0] != tokens || score.shape[1] != width)
    return false;
  if (objects[2] != Py_None) {
    if (!csa_torch_read(objects[2], &ape) || !csa_torch_is_array(&ape, kv, DL_FLOAT, 2) ||
        ape.shape[0] != a->ratio || ape.shape[1] != width)
      return false;
    a->ape = ape.data;
  }
  if (!csa_torch_read(objects[3], &starts) || !csa_torch_is_array(&starts, kv, DL_INT, 1) ||
      !csa_torch_read(objects[4], &sums) || !csa_torch_is_array(&sums, kv, DL_INT, 1) ||
      starts.shape[0] < 1 || sums.shape[0] != starts.shape[0])
    return false;
  a->device = kv->device_id;
  a->tokens = tokens;
  a->head_dim = width / a->coff;
  a->segments = starts.shape[0] - 1;
  a->kv = kv->data, a->kv_stride = csa_torch_row_stride(kv);
  a->score = score.data, a->score_stride = csa_torch_row_stride(&score);
  a->cu_seqlens = starts.data;
  a->cu_seqlens_comp = sums.data;
  return true;
}

static bool same_matrix(const dl_tensor *t, const dl_tensor *kv, int64_t rows, int64_t columns) {
  return csa_torch_is_matrix(t, kv) && t->shape[0] == rows && t->shape[1] == columns;
}

/* Rows of `out`: as asked for, else those of what is given. */
static bool read_rows(PyObject *total_comp, const dl_tensor *out, csa_args *a) {
  if (total_comp != Py_None) {
    if (!integer(total_comp, 0, COUNT_MAX, &a->rows)) return false;
  } else if (out != NULL && out->ndim == 2) {
    a->rows = out->shape[0];
  } else {
    return false;
  }
  return a->rows == 0 || a->tokens >= a->ratio;
}

/* None is the current stream. Memory for another is the array operations' to take. */
static bool read_stream(PyObject *stream, bool allocates, struct csa_call *call) {
  if (stream == Py_None) return csa_torch_current_stream(call->args.device, &call->stream);
  int64_t handle;
  if (allocates || !integer(stream, 0, INT64_MAX, &handle)) return false;
  call->stream = (void *)(uintptr_t)handle;
  return true;
}

static int run(enum csa_operation operation, const struct csa_call *call) {
  PyThreadState *state = PyEval_SaveThread();
  int code = csa_private_run(operation, &call->args, call->stream, NULL);
  PyEval_RestoreThread(state);
  return code;
}

static PyObject *not_here(void) {
  if (PyErr_Occurred()) return NULL;
  Py_INCREF(Py_None);
  return Py_None;
}

/* (kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, coff, total_comp, out, stream) -> out */
PyObject *csa_py_torch_forward(PyObject *self, PyObject *const *values, Py_ssize_t count) {
  (void)self;
  struct csa_call call = {.args = {.size = sizeof call.args}};
  csa_args *a = &call.args;
  dl_tensor kv, view;
  if (count != 10 || !read_inputs(values, values[5], values[6], &call, &kv)) return not_here();
  PyObject *out = values[8];
  bool given = out != Py_None;
  if (given && (!csa_torch_read(out, &view) || !csa_torch_is_writable(out))) return not_here();
  if (!read_rows(values[7], given ? &view : NULL, a) || !read_stream(values[9], !given, &call))
    return not_here();
  if (given)
    Py_INCREF(out);
  else if ((out = csa_torch_empty(values[0], a->rows, a->head_dim)) == NULL)
    return NULL;
  int code = -1;
  if (csa_torch_read(out, &view) && same_matrix(&view, &kv, a->rows, a->head_dim)) {
    a->out = view.data, a->out_stride = csa_torch_row_stride(&view);
    code = run(CSA_FORWARD, &call);
  }
  if (code == CSA_OK) return out;
  Py_DECREF(out);
  return code < 0 ? not_here() : csa_raise(code);
}
