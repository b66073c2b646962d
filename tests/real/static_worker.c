/* The worker of box_worker.py for an image without anything: one static binary, the same arguments, environment,
 * files and state. It knows no --tree, --socketpair, --pair and --listen. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { STATE_BYTES = 4096, PAUSE_MICROSECONDS = 20000, TICK_EVERY = 10, SHM_BYTES = 1 << 16 };

static const char *state_file = "/srv/state.json", *exit_file = "/srv/exit-code", *shm_file = "/dev/shm/box";
static unsigned long count;
static volatile unsigned long thread_count;
static int restored;

static void die(const char *what) {
  perror(what);
  exit(1);
}

/* name_of: the error's name, as far as this worker can meet it. */
static const char *name_of(int error) {
  switch (error) {
    case EPERM: return "EPERM";
    case EACCES: return "EACCES";
    case EROFS: return "EROFS";
    case ENOENT: return "ENOENT";
    case ENOSYS: return "ENOSYS";
    default: return "other";
  }
}

static const char *io_uring(void) {
  char params[256] = {0};
  long fd = syscall(SYS_io_uring_setup, 8, params);
  if (fd < 0) return name_of(errno);
  close(fd);
  return "fd";
}

static int put(const char *path, const char *text) {
  int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (fd < 0) return -1;
  ssize_t written = write(fd, text, strlen(text));
  close(fd);
  return written == (ssize_t)strlen(text) ? 0 : -1;
}

static const char *touch_files(void) {
  if (put("/etc/box/changed", "changed by the worker\n") || unlink("/etc/box/doomed") ||
      unlink("/opt/box/old") || rmdir("/opt/box") || mkdir("/opt/box", 0755) ||
      put("/opt/box/new", "new in a new directory\n") || mkdir("/srv/box", 0755) ||
      mkdir("/srv/box/deep", 0755) || mkdir("/srv/box/deep/er", 0755) ||
      put("/srv/box/deep/er/file", "new\n") || link("/srv/box/deep/er/file", "/srv/box/hard") ||
      symlink("deep/er/file", "/srv/box/soft"))
    return name_of(errno);
  return "ok";
}

static void *run_thread(void *unused) {
  for (;;) {
    thread_count++;
    usleep(PAUSE_MICROSECONDS);
  }
  return unused;
}

/* proc_status: the value of one line of this process's status. */
static void proc_status(const char *field, char *value, size_t size) {
  FILE *file = fopen("/proc/self/status", "re");
  char line[512];
  size_t length = strlen(field);
  value[0] = 0;
  if (!file) die("/proc/self/status");
  while (fgets(line, sizeof line, file)) {
    if (strncmp(line, field, length) || line[length] != ':') continue;
    line[strcspn(line, "\n")] = 0;
    snprintf(value, size, "%s", line + length + 1 + strspn(line + length + 1, " \t"));
  }
  fclose(file);
}

static void save(const char *files, const char *ring, int held) {
  char text[STATE_BYTES + 1], host[256] = "", self[64] = "", seccomp[64], privs[64], caps[64];
  unsigned long in_file = 0;
  int fd = open(shm_file, O_RDONLY | O_CLOEXEC);
  if (fd < 0 || read(fd, &in_file, sizeof in_file) != sizeof in_file) die(shm_file);
  close(fd);
  gethostname(host, sizeof host - 1);
  if (readlink("/proc/self", self, sizeof self - 1) < 0) die("/proc/self");
  proc_status("Seccomp", seccomp, sizeof seccomp);
  proc_status("NoNewPrivs", privs, sizeof privs);
  proc_status("CapEff", caps, sizeof caps);
  int length = snprintf(text, sizeof text,
      "{\"count\": %lu, \"restored\": %s, \"thread\": %lu, \"shm\": %lu, \"files\": \"%s\", \"io_uring\": \"%s\", "
      "\"held\": %d, \"pid\": %d, \"proc_self\": \"%s\", \"pgrp\": %d, \"uid\": %d, \"hostname\": \"%s\", "
      "\"seccomp\": %s, \"no_new_privs\": %s, \"capabilities\": \"%s\", \"pids\": [], \"children\": [], "
      "\"unix\": -1, \"tcp\": -1}",
      count, restored ? "true" : "false", thread_count, in_file, files, ring, held, getpid(), self, getpgrp(),
      getuid(), host, seccomp, privs, caps);
  memset(text + length, ' ', STATE_BYTES - length);
  /* One write over a file that keeps its name and its size: see box_worker.py. */
  fd = open(state_file, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0 || pwrite(fd, text, STATE_BYTES, 0) != STATE_BYTES) die(state_file);
  close(fd);
}

/* slurp: the start of a small file; 0 when it is not there. */
static int slurp(const char *path, char *text, size_t size) {
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t length = read(fd, text, size - 1);
  close(fd);
  text[length > 0 ? length : 0] = 0;
  return 1;
}

int main(int argc, char **argv) {
  const char *done = getenv("DYN_CHECKPOINT_SIGNAL_FILE"), *marker = getenv("DYN_RESTORE_MARKER_FILE");
  const char *ready = getenv("DYN_CHECKPOINT_READY_FILE"), *ring = "";
  int held = 4;
  for (int i = 1; i < argc; i++) {
    int more = i + 1 < argc;
    if (!strcmp(argv[i], "--io-uring")) ring = io_uring();
    else if (!strcmp(argv[i], "--no-ready")) ready = NULL;
    else if (!strcmp(argv[i], "--state") && more) state_file = argv[++i];
    else if (!strcmp(argv[i], "--exit-file") && more) exit_file = argv[++i];
    else if (!strcmp(argv[i], "--shm") && more) shm_file = argv[++i];
    else if (!strcmp(argv[i], "--mib") && more) held = atoi(argv[++i]);
    else {
      fprintf(stderr, "static_worker: what is %s?\n", argv[i]);
      return 2;
    }
  }
  printf("worker starts\n");
  fflush(stdout);
  fprintf(stderr, "worker's standard error\n");
  char *memory = malloc((size_t)held << 20);
  int random_fd = open("/dev/urandom", O_RDONLY);
  for (size_t at = 0; at < (size_t)held << 20; at += 1 << 16)
    if (read(random_fd, memory + at, 1 << 16) != 1 << 16) die("/dev/urandom");
  close(random_fd);
  const char *files = touch_files();
  int log_fd = open("/srv/box.log", O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  int shm_fd = open(shm_file, O_RDWR | O_CREAT | O_TRUNC, 0600);
  if (shm_fd < 0 || ftruncate(shm_fd, SHM_BYTES)) die(shm_file);
  unsigned long *shm = mmap(NULL, SHM_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, shm_fd, 0);
  if (shm == MAP_FAILED) die("mmap");
  close(shm_fd);
  pthread_t thread;
  if (pthread_create(&thread, NULL, run_thread, NULL)) die("pthread_create");

  for (;; usleep(PAUSE_MICROSECONDS)) {
    char text[512];
    count++;
    *shm = count;
    if (log_fd >= 0) dprintf(log_fd, "line %lu\n", count);
    if (count % TICK_EVERY == 0) {
      printf("tick %lu\n", count);
      fflush(stdout);
    }
    if (!restored && marker && !access(marker, F_OK)) {
      restored = 1;
      printf("restored at %lu\n", count);
      fflush(stdout);
    }
    save(files, ring, held);
    if (ready && put(ready, "")) die(ready);
    ready = NULL;
    if (!restored && done && slurp(done, text, sizeof text)) {
      const char *success = strstr(text, "\"success\"");
      return success && !strncmp(success + 9 + strspn(success + 9, ": "), "true", 4) ? 0 : 3;
    }
    if (slurp(exit_file, text, sizeof text)) return atoi(text);
  }
}
