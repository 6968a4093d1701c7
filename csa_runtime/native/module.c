// SPDX-License-Identifier: Apache-2.0
#include "module.h"

#include "torch_tensor.h"

PyObject *csa_raise(int code) {
  const struct csa_failure *failure = csa_private_failure();
  if (code == CSA_ERROR_VALUE) {
    PyErr_SetString(PyExc_ValueError, failure->message);
    return NULL;
  }
  if (code == CSA_ERROR_MEMORY) {
    PyErr_SetString(PyExc_MemoryError, failure->message);
    return NULL;
  }
  const char *name = code == CSA_ERROR_ARCH     ? "UnsupportedArch"
                     : code == CSA_ERROR_BUNDLE ? "BundleError"
                                                : "DriverError";
  PyObject *errors = PyImport_ImportModule("csa_runtime.errors");
  PyObject *type = errors != NULL ? PyObject_GetAttrString(errors, name) : NULL;
  PyObject *error = NULL;
  if (type != NULL && code == CSA_ERROR_DRIVER)
    error = PyObject_CallFunction(type, "ssis", failure->message, failure->name, failure->number,
                                  failure->call);
  else if (type != NULL)
    error = PyObject_CallFunction(type, "s", failure->message);
  if (error != NULL) PyErr_SetObject(type, error);
  Py_XDECREF(error);
  Py_XDECREF(type);
  Py_XDECREF(errors);
  return NULL;
}

static PyObject *none_or_raise(int code) {
  if (code != CSA_OK) return csa_raise(code);
  Py_INCREF(Py_None);
  return Py_None;
}

static PyObject *launch(enum csa_operation operation, enum csa_called called,
                        PyObject *const *values, Py_ssize_t count, PyObject *names) {
  struct csa_call call;
  if (csa_parse_call(called, values, count, names, &call) < 0) return NULL;
  PyThreadState *state = PyEval_SaveThread();
  int code = csa_private_run(operation, &call.args, call.stream, call.variant);
  PyEval_RestoreThread(state);
  return none_or_raise(code);
}

static PyObject *launch_forward(PyObject *self, PyObject *const *values, Py_ssize_t count,
                                PyObject *names) {
  (void)self;
  return launch(CSA_FORWARD, CSA_CALLED_FORWARD, values, count, names);
}

static PyObject *launch_backward(PyObject *self, PyObject *const *values, Py_ssize_t count,
                                 PyObject *names) {
  (void)self;
  return launch(CSA_BACKWARD, CSA_CALLED_BACKWARD, values, count, names);
}

static PyObject *workspace_bytes(PyObject *self, PyObject *positional, PyObject *keywords) {
  (void)self;
  static char *names[] = {"tokens", "rows", "head_dim", "ratio", "coff", "dtype_code", NULL};
  csa_args args = {.size = sizeof args};
  long long tokens, rows, head_dim;
  if (!PyArg_ParseTupleAndKeywords(positional, keywords, "LLLiii:backward_workspace_bytes", names,
                                   &tokens, &rows, &head_dim, &args.ratio, &args.coff,
                                   &args.dtype)) {
    if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
      PyErr_Clear();
      PyErr_SetString(PyExc_ValueError, "backward_workspace_bytes: a number is out of range");
    }
    return NULL;
  }
  args.tokens = tokens, args.rows = rows, args.head_dim = head_dim;
  int64_t bytes = 0;
  int code = csa_backward_workspace_bytes(&args, &bytes);
  return code == CSA_OK ? PyLong_FromLongLong(bytes) : csa_raise(code);
}

static PyObject *load(PyObject *self, PyObject *positional, PyObject *keywords) {
  (void)self;
  static char *names[] = {"device", "bundle", NULL};
  int device = -1;
  const char *bundle = NULL;
  if (!PyArg_ParseTupleAndKeywords(positional, keywords, "|iz:load", names, &device, &bundle))
    return NULL;
  PyThreadState *state = PyEval_SaveThread();
  int code = csa_load(device, bundle);
  PyEval_RestoreThread(state);
  return none_or_raise(code);
}

static PyObject *abi_version(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
  return PyLong_FromLong(csa_abi_version());
}

#define FIELDS_HELP                                                                             \
  "Addresses and streams are integers (None: NULL). Counts: tokens T, segments B, rows of the " \
  "output, head_dim d.\nStrides: from a row to the next, in elements, not bytes.\n"             \
  "dtype: 1, bf16; no other is served. flags: 1 adds to grad_ape. workspace_bytes: bytes.\n"    \
  "variant: the name of one kernel to use, None to let the schedule choose.\n"
#define ERRORS_HELP \
  "Raises ValueError before anything is launched, UnsupportedArch, DriverError or BundleError."

#define CALLABLE(function) (PyCFunction)(void (*)(void))(function)

static PyMethodDef METHODS[] = {
    {"launch_forward", CALLABLE(launch_forward), METH_FASTCALL | METH_KEYWORDS,
     "launch_forward(*, device=0, ratio, coff, dtype, flags=0, tokens, segments, rows, head_dim, "
     "kv, score, ape=None, cu_seqlens, cu_seqlens_comp, out, kv_stride, score_stride, out_stride, "
     "stream=0, variant=None)\n--\n\n"
     "Enqueue the forward pass on `stream`: the fields of csa_args (csa_runtime.h).\n\n" FIELDS_HELP
     "\n"
     ">>> launch_forward(ratio=4, coff=1, dtype=1, tokens=4, segments=1, rows=1, head_dim=128,\n"
     "...     kv=kv.data_ptr(), score=score.data_ptr(), out=out.data_ptr(),\n"
     "...     cu_seqlens=cu.data_ptr(), cu_seqlens_comp=cu_comp.data_ptr(),\n"
     "...     kv_stride=128, score_stride=128, out_stride=128, "
     "stream=stream.cuda_stream)\n\n" ERRORS_HELP},
    {"launch_backward", CALLABLE(launch_backward), METH_FASTCALL | METH_KEYWORDS,
     "launch_backward(*, device=0, ratio, coff, dtype, flags=0, tokens, segments, rows, head_dim, "
     "kv, score, ape=None, cu_seqlens, cu_seqlens_comp, grad_out, grad_kv, grad_score, "
     "grad_ape=None, workspace=None, workspace_bytes=0, kv_stride, score_stride, grad_out_stride, "
     "grad_kv_stride, grad_score_stride, stream=0, variant=None)\n--\n\n"
     "Enqueue the backward pass on `stream`: the fields of csa_args "
     "(csa_runtime.h).\n\n" FIELDS_HELP "\n"
     ">>> need = backward_workspace_bytes(4, 1, 128, 4, 1, 1)\n"
     ">>> launch_backward(ratio=4, coff=1, dtype=1, tokens=4, segments=1, rows=1, head_dim=128,\n"
     "...     kv=kv.data_ptr(), score=score.data_ptr(), ape=ape.data_ptr(),\n"
     "...     cu_seqlens=cu.data_ptr(), cu_seqlens_comp=cu_comp.data_ptr(),\n"
     "...     grad_out=grad_out.data_ptr(), grad_kv=grad_kv.data_ptr(),\n"
     "...     grad_score=grad_score.data_ptr(), grad_ape=grad_ape.data_ptr(),\n"
     "...     workspace=scratch.data_ptr(), workspace_bytes=need, kv_stride=128,\n"
     "...     score_stride=128, grad_out_stride=128, grad_kv_stride=128, "
     "grad_score_stride=128)\n\n" ERRORS_HELP},
    {"backward_workspace_bytes", CALLABLE(workspace_bytes), METH_VARARGS | METH_KEYWORDS,
     "Bytes of workspace that suffice on every device and for every alignment; no driver."},
    {"explain", CALLABLE(csa_py_explain), METH_FASTCALL | METH_KEYWORDS,
     "What a call would launch; with compute_capability, without a driver."},
    {"load", CALLABLE(load), METH_VARARGS | METH_KEYWORDS,
     "Load and finish every kernel of a device's architecture (-1: the current one), in the "
     "primary and the current context."},
    {"bundle_info", csa_py_bundle_info, METH_NOARGS, "What the bundle in use holds; no driver."},
    {"driver_info", csa_py_driver_info, METH_NOARGS, "The driver and its devices; starts it."},
    {"launch_counts", csa_py_launch_counts, METH_NOARGS,
     "Successful launches of each (variant, architecture) so far, where there were any."},
    {"bind_torch", CALLABLE(csa_py_bind_torch), METH_FASTCALL,
     "Say what torch's tensors are: (Tensor, Parameter, exchange API, current raw stream)."},
    {"torch_forward", CALLABLE(csa_py_torch_forward), METH_FASTCALL,
     "compressor_forward's arguments in order, on torch tensors; None: not a usual call."},
    {"torch_backward", CALLABLE(csa_py_torch_backward), METH_FASTCALL,
     "compressor_backward's arrays, ratio and coff, whether a new grad_ape is wanted, and its "
     "other "
     "options; as above."},
    {"torch_usual", CALLABLE(csa_py_torch_usual), METH_FASTCALL,
     "Whether all of these are torch's own tensors with memory on a GPU."},
    {"abi_version", abi_version, METH_NOARGS, "CSA_ABI_VERSION of libcsa_runtime.so."},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module) {
  (void)module;
  return csa_keywords_init();
}

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, (void *)module_exec}, {0, NULL}};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "csa_runtime._native",
    .m_doc = "The launcher, as is: addresses and integers in, kernels out.",
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__native(void);
PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&MODULE); }
