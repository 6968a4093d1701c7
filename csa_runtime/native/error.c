// SPDX-License-Identifier: Apache-2.0
#include "error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local struct csa_failure failure;

int csa_fail(int code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(failure.message, sizeof failure.message, format, arguments);
  va_end(arguments);
  failure.name[0] = failure.call[0] = 0;
  failure.number = 0;
  return code;
}

int csa_fail_driver(const char *name, int number, const char *call, const char *format, ...) {
  snprintf(failure.name, sizeof failure.name, "%s", name);
  snprintf(failure.call, sizeof failure.call, "%s", call);
  failure.number = number;
  int used = snprintf(failure.message, sizeof failure.message, "%s: %s (%d)", call, name, number);
  if (format[0] != 0 && used > 0 && (size_t)used + 2 < sizeof failure.message) {
    failure.message[used] = ':';
    failure.message[used + 1] = ' ';
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(failure.message + used + 2, sizeof failure.message - (size_t)used - 2, format,
              arguments);
    va_end(arguments);
  }
  return CSA_ERROR_DRIVER;
}

const struct csa_failure *csa_failure_get(void) { return &failure; }
