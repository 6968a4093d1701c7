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
enum { NOT_HERE = -1 }; /* beside csa_runtime.h's codes */

/* An `int` of [low, high]; None and numbers of other types are for the array operations. */
static bool integer(PyObject *object, int64_t low, int64_t high, int64_t *number) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow;
  *number = PyLong_AsLongAndOverflow(object, &overflow);
  return overflow == 0 && *number >= low && *number <= high;
}

static bool same_matrix(const dl_tensor *t, const dl_tensor *kv, int64_t rows, int64_t columns) {
  return csa_torch_is_matrix(t, kv) && t->shape[0] == rows && t->shape[1] == columns;
}

/* Of ape's shape and dtype. */
static bool same_bias(const dl_tensor *t, const dl_tensor *kv, int64_t ratio, int64_t width) {
  return csa_torch_is_array(t, kv, DL_FLOAT, 2) && t->shape[0] == ratio && t->shape[1] == width;
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
  if (!csa_torch_read(objects[1], &score) || !same_matrix(&score, kv, tokens, width)) return false;
  if (objects[2] != Py_None) {
    if (!csa_torch_read(objects[2], &ape) || !same_bias(&ape, kv, a->ratio, width)) return false;
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

/* A tensor to write into. */
static bool read_result(PyObject *tensor, dl_tensor *view) {
  return csa_torch_read(tensor, view) && csa_torch_is_writable(tensor);
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
  int64_t handle = 0;
  bool named = stream != Py_None;
  if (named && !integer(stream, 0, INT64_MAX, &handle)) return false;
  void *given = (void *)(uintptr_t)handle;
  if (named && !allocates) {
    call->stream = given;
    return true;
  }
  return csa_torch_current_stream(call->args.device, &call->stream) &&
         (!named || given == call->stream);
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
  if (given && !read_result(out, &view)) return not_here();
  if (!read_rows(values[7], given ? &view : NULL, a) || !read_stream(values[9], !given, &call))
    return not_here();
  if (given)
    Py_INCREF(out);
  else if ((out = csa_torch_empty(values[0], a->rows, a->head_dim)) == NULL)
    return NULL;
  int code = NOT_HERE;
  if ((given || csa_torch_has_memory(out, &view)) &&
      same_matrix(&view, &kv, a->rows, a->head_dim)) {
    a->out = view.data, a->out_stride = csa_torch_row_stride(&view);
    code = run(CSA_FORWARD, &call);
  }
  if (code == CSA_OK) return out;
  Py_DECREF(out);
  return code == NOT_HERE ? not_here() : csa_raise(code);
}

/* fp32 elements of the workspace to take. Under a capture, or where nobody can tell, its lifetime
 * is for the array operations to decide. */
static bool workspace_elements(const struct csa_call *call, int64_t *elements) {
  int64_t bytes;
  if (csa_backward_workspace_bytes(&call->args, &bytes) != CSA_OK) return false;
  *elements = bytes / 4;
  return bytes == 0 || !csa_private_capturing(call->stream);
}

/* What a backward writes: references of its own. */
struct results {
  PyObject *workspace, *ape, *kv, *score;
};

static bool read_gradients(PyObject *grads, const dl_tensor *kv, struct results *r, csa_args *a) {
  if (!PyTuple_CheckExact(grads) || PyTuple_Size(grads) != 3) return false;
  int64_t width = a->coff * a->head_dim;
  dl_tensor view;
  Py_INCREF(r->kv = PyTuple_GetItem(grads, 0));
  Py_INCREF(r->score = PyTuple_GetItem(grads, 1));
  Py_INCREF(r->ape = PyTuple_GetItem(grads, 2));
  if (!read_result(r->kv, &view) || !same_matrix(&view, kv, a->tokens, width)) return false;
  a->grad_kv = view.data, a->grad_kv_stride = csa_torch_row_stride(&view);
  if (!read_result(r->score, &view) || !same_matrix(&view, kv, a->tokens, width)) return false;
  a->grad_score = view.data, a->grad_score_stride = csa_torch_row_stride(&view);
  if (r->ape == Py_None) return a->ape == NULL || (a->flags & CSA_FLAG_ACCUMULATE) == 0;
  if (a->ape == NULL || !read_result(r->ape, &view) || !same_bias(&view, kv, a->ratio, width))
    return false;
  a->grad_ape = view.data;
  return true;
}

/* A new tensor like `like`, described; false with or without an exception. */
static bool make(PyObject *like, int64_t rows, int64_t columns, PyObject **made, dl_tensor *view) {
  *made = csa_torch_empty(like, rows, columns);
  return *made != NULL && csa_torch_has_memory(*made, view) && view->ndim == 2;
}

static bool make_gradients(PyObject *const *inputs, bool sums, struct results *r, csa_args *a) {
  int64_t width = a->coff * a->head_dim;
  dl_tensor view;
  if (sums) {
    if (!make(inputs[2], a->ratio, width, &r->ape, &view)) return false;
    a->grad_ape = view.data;
  }
  if (!make(inputs[0], a->tokens, width, &r->kv, &view)) return false;
  a->grad_kv = view.data, a->grad_kv_stride = csa_torch_row_stride(&view);
  if (!make(inputs[1], a->tokens, width, &r->score, &view)) return false;
  a->grad_score = view.data, a->grad_score_stride = csa_torch_row_stride(&view);
  return true;
}

/* What a backward is called with besides its inputs. */
struct options {
  PyObject *need_ape, *grads, *workspace, *accumulate, *stream;
};

/* Into `call`, all that a backward writes; new memory is taken last, the workspace's first. */
static bool take_results(PyObject *const *inputs, const dl_tensor *kv, const struct options *o,
                         struct results *r, struct csa_call *call) {
  csa_args *a = &call->args;
  bool given = o->grads != Py_None, accumulate = o->accumulate == Py_True;
  if ((!accumulate && o->accumulate != Py_False) || (accumulate && !given)) return false;
  if (accumulate) a->flags = CSA_FLAG_ACCUMULATE;
  if (given && !read_gradients(o->grads, kv, r, a)) return false;
  bool sums = given ? a->grad_ape != NULL : a->ape != NULL && o->need_ape == Py_True;
  if (!sums) a->flags = 0;
  int64_t elements = 0;
  dl_tensor view;
  if (o->workspace != Py_None) {
    if (!read_result(o->workspace, &view)) return false;
    int64_t bytes = csa_torch_scratch_bytes(&view, kv);
    if (bytes < 0) return false;
    if (sums && bytes > 0) a->workspace = view.data, a->workspace_bytes = bytes;
  }
  bool takes = sums && o->workspace == Py_None;
  if (!read_stream(o->stream, takes || !given, call) ||
      (takes && !workspace_elements(call, &elements)))
    return false;
  if (elements > 0) {
    if (!make(inputs[2], 1, elements, &r->workspace, &view)) return false;
    a->workspace = view.data, a->workspace_bytes = 4 * elements;
  }
  return given || make_gradients(inputs, sums, r, a);
}

/* (kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, ratio, coff, need_ape, grads, workspace,
 * accumulate, stream) -> gradients; need_ape is of new ones */
PyObject *csa_py_torch_backward(PyObject *self, PyObject *const *values, Py_ssize_t count) {
  (void)self;
  struct csa_call call = {.args = {.size = sizeof call.args}};
  csa_args *a = &call.args;
  dl_tensor kv, view;
  if (count != 13 || !read_inputs(values, values[6], values[7], &call, &kv) ||
      !csa_torch_read(values[5], &view) || view.ndim != 2 || view.shape[0] > COUNT_MAX ||
      !same_matrix(&view, &kv, view.shape[0], a->head_dim) ||
      (view.shape[0] > 0 && a->tokens < a->ratio))
    return not_here();
  a->rows = view.shape[0];
  a->grad_out = view.data, a->grad_out_stride = csa_torch_row_stride(&view);
  struct options options = {values[8], values[9], values[10], values[11], values[12]};
  struct results r = {0};
  int code = take_results(values, &kv, &options, &r, &call) ? run(CSA_BACKWARD, &call) : NOT_HERE;
  PyObject *grads = NULL;
  if (code == CSA_OK)
    grads = PyTuple_Pack(3, r.kv, r.score, r.ape != NULL ? r.ape : Py_None);
  else
    grads = code == NOT_HERE ? not_here() : csa_raise(code);
  Py_XDECREF(r.workspace);
  Py_XDECREF(r.ape);
  Py_XDECREF(r.kv);
  Py_XDECREF(r.score);
  return grads;
}

/* Whether all of these are torch's own tensors with memory on a GPU; ape, the third, may be None.
 */
PyObject *csa_py_torch_usual(PyObject *self, PyObject *const *values, Py_ssize_t count) {
  (void)self;
  bool usual = true;
  dl_tensor view;
  for (Py_ssize_t i = 0; usual && i < count; i++)
    usual = (i == 2 && values[i] == Py_None) || csa_torch_has_memory(values[i], &view);
  return PyBool_FromLong(usual);
}
