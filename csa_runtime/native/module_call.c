// SPDX-License-Identifier: Apache-2.0
/* Keywords of a call -> csa_args. */
#include <stddef.h>
#include <string.h>

#include "module.h"

static const char *const FUNCTIONS[] = {"launch_forward", "launch_backward", "explain"};

enum kind { POINTER, INT64, INT32, STREAM, VARIANT, CAPABILITY, SHARED_LIMIT, OPERATION };

static const struct field {
  const char *name;
  enum kind kind;
  size_t offset; /* in csa_args */
} FIELDS[] = {
#define F(name, kind) {#name, kind, offsetof(csa_args, name)}
    F(device, INT32),
    F(ratio, INT32),
    F(coff, INT32),
    F(dtype, INT32),
    F(flags, INT32),
    F(tokens, INT64),
    F(segments, INT64),
    F(rows, INT64),
    F(head_dim, INT64),
    F(kv, POINTER),
    F(score, POINTER),
    F(ape, POINTER),
    F(cu_seqlens, POINTER),
    F(cu_seqlens_comp, POINTER),
    F(out, POINTER),
    F(grad_out, POINTER),
    F(grad_kv, POINTER),
    F(grad_score, POINTER),
    F(grad_ape, POINTER),
    F(workspace, POINTER),
    F(workspace_bytes, INT64),
    F(kv_stride, INT64),
    F(score_stride, INT64),
    F(out_stride, INT64),
    F(grad_out_stride, INT64),
    F(grad_kv_stride, INT64),
    F(grad_score_stride, INT64),
#undef F
    {"stream", STREAM, 0},
    {"variant", VARIANT, 0},
    {"compute_capability", CAPABILITY, 0},
    {"shared_limit", SHARED_LIMIT, 0},
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

/* For each function, the field that the i-th keyword of its latest call meant: nearly always this
 * call's too. The interpreter's lock guards it. */
static uint8_t latest[CSA_CALLED_COUNT][FIELD_COUNT];

/* The field of keyword `i`, or NULL with an exception. */
static const struct field *field_of(enum csa_called called, PyObject *name, int i) {
  uint8_t *fields = latest[called];
  if (i < FIELD_COUNT && interned[fields[i]] == name) return &FIELDS[fields[i]];
  int index = -1;
  if (PyUnicode_Check(name))
    index = find(name, called == CSA_CALLED_EXPLAIN ? FIELD_COUNT : LAUNCH_FIELD_COUNT);
  else
    PyErr_SetString(PyExc_TypeError, "keywords must be strings");
  if (index >= 0) {
    if (i < FIELD_COUNT) fields[i] = (uint8_t)index;
    return &FIELDS[index];
  }
  if (!PyErr_Occurred())
    PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument %R", FUNCTIONS[called],
                 name);
  return NULL;
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
  char *at = (char *)&call->args + field->offset;
  uintptr_t address;
  long long number;
  if (field->kind == OPERATION) {
    call->operation = value;
    return 0;
  }
  if (value == Py_None) return 0; /* as if it were left out */
  switch (field->kind) {
    case POINTER:
    case STREAM:
      if (as_address(field->name, value, &address) < 0) return -1;
      if (field->kind == STREAM)
        call->stream = (void *)address;
      else
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
  if (field->kind == CAPABILITY)
    call->capability = (int32_t)number;
  else if (field->kind == SHARED_LIMIT)
    call->shared_limit = (int32_t)number;
  else
    memcpy(at, &(int32_t){(int32_t)number}, 4);
  return 0;
}

_Static_assert(sizeof(long) == 8, "a long holds every field");

/* The usual case, a positive integer that fits, without the checks of `assign`; 0 if it is not.
 * PyLong_AsLongAndOverflow reads an address in a third of PyLong_AsLongLong's time. */
static inline int assign_plain(const struct field *field, PyObject *value, struct csa_call *call) {
  if (field->kind > STREAM || !PyLong_CheckExact(value)) return 0;
  int overflow;
  long number = PyLong_AsLongAndOverflow(value, &overflow);
  if (number <= 0) {
    if (number == -1) PyErr_Clear();
    return number == 0; /* as it is already */
  }
  char *at = (char *)&call->args + field->offset;
  if (field->kind == STREAM)
    call->stream = (void *)number;
  else if (field->kind != INT32)
    memcpy(at, &number, 8);
  else if (number > INT32_MAX)
    return 0;
  else
    memcpy(at, &(int32_t){(int32_t)number}, 4);
  return 1;
}

int csa_parse_call(enum csa_called called, PyObject *positional, PyObject *keywords,
                   struct csa_call *call) {
  memset(call, 0, sizeof *call);
  call->args.size = sizeof call->args;
  call->capability = -1;
  Py_ssize_t count = PyTuple_Size(positional);
  if (called == CSA_CALLED_EXPLAIN && count == 1) {
    call->operation = PyTuple_GetItem(positional, 0);
  } else if (count != 0) {
    PyErr_Format(PyExc_TypeError, "%s() takes keyword arguments only", FUNCTIONS[called]);
    return -1;
  }
  PyObject *name, *value;
  Py_ssize_t position = 0;
  for (int i = 0; keywords != NULL && PyDict_Next(keywords, &position, &name, &value); i++) {
    const struct field *field = field_of(called, name, i);
    if (field == NULL) return -1;
    if (!assign_plain(field, value, call) && assign(field, value, call) < 0) return -1;
  }
  return 0;
}
