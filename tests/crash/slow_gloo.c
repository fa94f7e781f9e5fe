/* Preloaded: keeps gloo's threads at work for SLOW_GLOO_MS after each collective, as a
   machine does that gives them no core. They tell their caller by a broadcast. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double milliseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

int pthread_cond_broadcast(pthread_cond_t *condition) {
  int (*broadcast)(pthread_cond_t *) = dlsym(RTLD_NEXT, "pthread_cond_broadcast");
  int result = broadcast(condition);
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  if (strcmp(name, "pt_gloo_runloop") == 0) {
    double end = milliseconds() + atof(getenv("SLOW_GLOO_MS"));
    while (milliseconds() < end);
  }
  return result;
}
