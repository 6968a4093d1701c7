// SPDX-License-Identifier: Apache-2.0
/* The Python module _native: conversions, and the checks of the usual call on torch's tensors.
 * Limited API, Python 3.10 and up. */
#ifndef CSA_MODULE_H
#define CSA_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "private.h"

/* Raise the thread's latest failure as its Python exception; returns NULL. */
PyObject *csa_raise(int code);

/* What launch_forward, launch_backward and explain are called with. */
struct csa_call {
  csa_args args;
  void *stream;
  const char *variant;              /* borrowed from the call's arguments, or NULL */
  int32_t capability, shared_limit; /* explain only */
  PyObject *operation;              /* explain only; borrowed */
};

/* Create the interned keyword names; 0 or -1 with an exception. */
int csa_keywords_init(void);

enum csa_called { CSA_CALLED_FORWARD, CSA_CALLED_BACKWARD, CSA_CALLED_EXPLAIN, CSA_CALLED_COUNT };

/* Parse a METH_FASTCALL | METH_KEYWORDS call whose keywords are csa_args' fields, stream and
 * variant, and for explain also compute_capability, shared_limit and operation, the latter
 * positionally too. Returns 0, or -1 with an exception. */
int csa_parse_call(enum csa_called called, PyObject *const *values, Py_ssize_t count,
                   PyObject *names, struct csa_call *call);

/* The functions that report rather than launch. */
PyObject *csa_py_explain(PyObject *self, PyObject *const *values, Py_ssize_t count,
                         PyObject *names);
PyObject *csa_py_bundle_info(PyObject *self, PyObject *unused);
PyObject *csa_py_driver_info(PyObject *self, PyObject *unused);
PyObject *csa_py_launch_counts(PyObject *self, PyObject *unused);

/* The functions that take torch's tensors; they return None for a call that is not theirs. */
PyObject *csa_py_torch_forward(PyObject *self, PyObject *const *values, Py_ssize_t count);
PyObject *csa_py_torch_backward(PyObject *self, PyObject *const *values, Py_ssize_t count);
PyObject *csa_py_torch_usual(PyObject *self, PyObject *const *values, Py_ssize_t count);

#endif
