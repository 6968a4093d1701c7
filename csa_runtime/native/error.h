// SPDX-License-Identifier: Apache-2.0
/* The thread's latest failure: C returns codes and keeps the message here; Python raises it. */
#ifndef CSA_ERROR_H
#define CSA_ERROR_H

#include "csa_runtime.h"

struct csa_failure {
  char message[1536];
  char name[64]; /* the driver's name of the error; "" unless CSA_ERROR_DRIVER */
  char call[64]; /* the driver function that failed */
  int number;    /* the driver's number of the error */
};

/* Record a failure; returns `code`, so that callers can `return csa_fail(...)`. */
int csa_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3), cold));

/* Record a driver failure (CSA_ERROR_DRIVER). The message gets "call: name (number)" in front. */
int csa_fail_driver(const char *name, int number, const char *call, const char *format, ...)
    __attribute__((format(printf, 4, 5), cold));

/* This thread's record; never NULL. */
const struct csa_failure *csa_failure_get(void);

#endif
