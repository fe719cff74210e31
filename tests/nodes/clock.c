/* A wall clock that is off: preloaded (LD_PRELOAD), it shifts CLOCK_REALTIME by CLOCK_OFFSET_MS of the environment.

   The monotonic clock stays. `set_clock_offset` shifts a process that runs already, and the processes that it forks.
   Deadlines of waits on the wall clock are shifted back, so that waits last as long as they should. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long long offset_ns;

void set_clock_offset(long long ns) { offset_ns = ns; }

__attribute__((constructor)) static void read_environment(void) {
    const char *text = getenv("CLOCK_OFFSET_MS");
    if (text) offset_ns = atoll(text) * 1000000LL;
}

static void *next(const char *name) {
    /* The default version: plain dlsym may return that of 1997, which takes another condition variable. */
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
    return found ? found : dlsym(RTLD_NEXT, name);
}

static struct timespec shifted(const struct timespec *at, long long by_ns) {
    long long ns = at->tv_sec * 1000000000LL + at->tv_nsec + by_ns;
    return (struct timespec){ns / 1000000000LL, ns % 1000000000LL};
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = next("clock_gettime");
    int failed = real(clock, now);
    if (!failed && offset_ns && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) *now = shifted(now, offset_ns);
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    *now = (struct timeval){at.tv_sec, at.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *into) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (into) *into = at.tv_sec;
    return at.tv_sec;
}

/* A deadline below 10^8 s is one of the monotonic clock, which a condition variable can be set to. */
static struct timespec real_deadline(const struct timespec *until) {
    return until->tv_sec < 100000000 ? *until : shifted(until, -offset_ns);
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) real = next("pthread_cond_timedwait");
    struct timespec deadline = real_deadline(until);
    return real(condition, mutex, &deadline);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real) real = next("sem_timedwait");
    struct timespec deadline = real_deadline(until);
    return real(semaphore, &deadline);
}
