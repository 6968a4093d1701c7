// SPDX-License-Identifier: Apache-2.0
/* Keywords of a call -> csa_args. */
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "module.h"

static const char *const FUNCTIONS[] = {"launch_forward", "launch_backward", "explain"};

enum kind { ADDRESS, INT64, INT32, VARIANT, CAPABILITY, OPERATION };

static const struct field {
  const char *name;
  enum kind kind;
  size_t offset; /* in csa_call */
} FIELDS[] = {
#define F(name, kind) {#name, kind, offsetof(struct csa_call, args.name)}
    F(device, INT32),
    F(ratio, INT32),
    F(coff, INT32),
    F(dtype, INT32),
    F(flags, INT32),
    F(tokens, INT64),
    F(segments, INT64),
    F(rows, INT64),
    F(head_dim, INT64),
    F(kv, ADDRESS),
    F(score, ADDRESS),
    F(ape, ADDRESS),
    F(cu_seqlens, ADDRESS),
    F(cu_seqlens_comp, ADDRESS),
    F(out, ADDRESS),
    F(grad_out, ADDRESS),
    F(grad_kv, ADDRESS),
    F(grad_score, ADDRESS),
    F(grad_ape, ADDRESS),
    F(workspace, ADDRESS),
    F(workspace_bytes, INT64),
    F(kv_stride, INT64),
    F(score_stride, INT64),
    F(out_stride, INT64),
    F(grad_out_stride, INT64),
    F(grad_kv_stride, INT64),
    F(grad_score_stride, INT64),
#undef F
    {"stream", ADDRESS, offsetof(struct csa_call, stream)},
    {"variant", VARIANT, 0},
    {"compute_capability", CAPABILITY, offsetof(struct csa_call, capability)},
    {"shared_limit", INT32, offsetof(struct csa_call, shared_limit)},
    {"operation", OPERATION, 0},
};
enum { FIELD_COUNT = sizeof FIELDS / sizeof FIELDS[0], LAUNCH_FIELD_COUNT = FIELD_COUNT - 3 };

static PyObject *interned[FIELD_COUNT];

int csa_keywords_init(void) {
  for (int i = 0; i < FIELD_COUNT; i++) {
    if (interned[i] == NULL) interned[i] = PyUnicode_InternFromString(FIELDS[i].name);
    if (interned[i] == NULL) return -1;
  }
  return 0;
}

static int find(PyObject *name, int count) {
  for (int i = 0; i < count; i++)
    if (interned[i] == name) return i;
  for (int i = 0; i < count; i++)
    if (PyUnicode_Compare(interned[i], name) == 0) return i;
  return -1;
}

/* What a function's keywords meant when they last had other names or another order. A call spelled
 * out in the source passes the same tuple of names each time; it is kept, so that no other one has
 * its address. The interpreter's lock guards it. */
struct meanings {
  PyObject *names;
  uint8_t fields[FIELD_COUNT];
};
static struct meanings latest[CSA_CALLED_COUNT];

/* Make `known`, a copy of the latest, that of these keywords; 0, or -1 with an exception. */
static int learn(enum csa_called called, PyObject *names, Py_ssize_t count,
                 struct meanings *known) {
  int served = called == CSA_CALLED_EXPLAIN ? FIELD_COUNT : LAUNCH_FIELD_COUNT;
  bool changed = false;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *name = PyTuple_GetItem(names, i);
    if (i < FIELD_COUNT && interned[known->fields[i]] == name) continue;
    int index = find(name, served);
    if (index < 0 || i >= FIELD_COUNT) {
      PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument %R", FUNCTIONS[called],
                   name);
      return -1;
    }
    known->fields[i] = (uint8_t)index;
    changed = true;
  }
  if (!changed) return 0;
  PyObject *before = latest[called].names;
  Py_INCREF(known->names = names);
  latest[called] = *known;
  Py_XDECREF(before);
  return 0;
}

/* Out of range is a malformed argument: ValueError, not OverflowError. */
static int out_of_range(const char *name, PyObject *value, const char *allowed) {
  if (!PyErr_ExceptionMatches(PyExc_OverflowError)) {
    if (PyErr_ExceptionMatches(PyExc_TypeError))
      PyErr_Format(PyExc_TypeError, "%s: %R is no integer", name, value);
    return -1;
  }
  PyErr_Clear();
  PyErr_Format(PyExc_ValueError, "%s is %R; pass %s", name, value, allowed);
  return -1;
}

static int as_int64(const char *name, PyObject *value, long long low, long long high,
                    const char *allowed, long long *number) {
  *number = PyLong_AsLongLong(value);
  if (*number == -1 && PyErr_Occurred()) return out_of_range(name, value, allowed);
  if (*number >= low && *number <= high) return 0;
  PyErr_Format(PyExc_ValueError, "%s is %R; pass %s", name, value, allowed);
  return -1;
}

static int as_address(const char *name, PyObject *value, uintptr_t *address) {
  unsigned long long number = PyLong_AsUnsignedLongLong(value);
  if (number == (unsigned long long)-1 && PyErr_Occurred()) {
    if (PyErr_ExceptionMatches(PyExc_TypeError)) {
      PyErr_Clear();
      PyObject *integer = PyNumber_Index(value);
      if (integer == NULL) return out_of_range(name, value, "an integer");
      number = PyLong_AsUnsignedLongLong(integer);
      Py_DECREF(integer);
    }
    if (number == (unsigned long long)-1 && PyErr_Occurred())
      return out_of_range(name, value, "an address as an integer from 0 to 2**64 - 1, or None");
  }
  *address = (uintptr_t)number;
  return 0;
}

static int as_variant(PyObject *value, struct csa_call *call) {
  Py_ssize_t length = 0;
  if (!PyUnicode_Check(value)) {
    PyErr_Format(PyExc_TypeError, "variant: %R is no string; pass a variant's name or None", value);
    return -1;
  }
  call->variant = PyUnicode_AsUTF8AndSize(value, &length);
  if (call->variant == NULL) return -1;
  if ((size_t)length == strlen(call->variant)) return 0;
  PyErr_Format(PyExc_ValueError, "variant: %R holds a NUL", value);
  return -1;
}

static int assign(const struct field *field, PyObject *value, struct csa_call *call) {
  char *at = (char *)call + field->offset;
  uintptr_t address;
  long long number;
  if (field->kind == OPERATION) {
    call->operation = value;
    return 0;
  }
  if (value == Py_None) return 0; /* as if it were left out */
  switch (field->kind) {
    case ADDRESS:
      if (as_address(field->name, value, &address) < 0) return -1;
      memcpy(at, &address, sizeof address);
      return 0;
    case INT64:
      if (as_int64(field->name, value, INT64_MIN, INT64_MAX, "a 64-bit integer", &number) < 0)
        return -1;
      memcpy(at, &(int64_t){number}, 8);
      return 0;
    case VARIANT:
      return as_variant(value, call);
    default:
      break;
  }
  if (as_int64(field->name, value, INT32_MIN, INT32_MAX, "a 32-bit integer", &number) < 0)
    return -1;
  if (field->kind == CAPABILITY && number < 0) {
    PyErr_Format(PyExc_ValueError, "compute_capability is %R; pass one such as 90 for 9.0", value);
    return -1;
  }
  memcpy(at, &(int32_t){(int32_t)number}, 4);
  return 0;
}

_Static_assert(sizeof(long) == 8, "a long holds every field");

/* The usual case, an integer from 0 on that fits, without the checks of `assign`; 0 if it is not.
 * PyLong_AsLongAndOverflow reads an address in a third of PyLong_AsLongLong's time. */
static inline int assign_plain(const struct field *field, PyObject *value, struct csa_call *call) {
  if (field->kind > INT32 || !PyLong_CheckExact(value)) return 0;
  int overflow;
  long number = PyLong_AsLongAndOverflow(value, &overflow);
  if (number < 0 || (field->kind == INT32 && number > INT32_MAX)) {
    if (number == -1) PyErr_Clear();
    return 0;
  }
  char *at = (char *)call + field->offset;
  if (field->kind == INT32)
    memcpy(at, &(int32_t){(int32_t)number}, 4);
  else
    memcpy(at, &number, 8);
  return 1;
}

int csa_parse_call(enum csa_called called, PyObject *const *values, Py_ssize_t count,
                   PyObject *names, struct csa_call *call) {
  memset(call, 0, sizeof *call);
  call->args.size = sizeof call->args;
  call->capability = -1;
  if (called == CSA_CALLED_EXPLAIN && count == 1) {
    call->operation = values[0];
  } else if (count != 0) {
    PyErr_Format(PyExc_TypeError, "%s() takes keyword arguments only", FUNCTIONS[called]);
    return -1;
  }
  Py_ssize_t keywords = names != NULL ? PyTuple_Size(names) : 0;
  /* A copy: an integer's own __index__ may call the same function. */
  struct meanings known = latest[called];
  if (keywords > 0 && names != known.names && learn(called, names, keywords, &known) < 0) return -1;
  for (Py_ssize_t i = 0; i < keywords; i++) {
    const struct field *field = &FIELDS[known.fields[i]];
    PyObject *value = values[count + i];
    if (!assign_plain(field, value, call) && assign(field, value, call) < 0) return -1;
  }
  return 0;
}
