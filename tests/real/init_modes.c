/* Inits that are hard to end from outside; the first argument names which one. Prints a line when it is so. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static void ready(void)
{
	if (write(1, "ready\n", 6) != 6)
		_exit(99);
}

static void *stay(void *unused)
{
	ready();
	for (;;)
		pause();
	return unused;
}

static void *end_with_7(void *unused)
{
	char byte;
	ready();
	while (read(0, &byte, 1) < 0)
		;
	_exit(7);
	return unused;
}

static void first_thread_ends(void *(*other)(void *))
{
	pthread_t thread;
	pthread_create(&thread, NULL, other, NULL);
	syscall(SYS_exit, 0);
}

static void forbid_exit_group(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {sizeof code / sizeof *code, code};
	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
		_exit(98);
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "";
	if (strcmp(mode, "spin") == 0) {
		ready();
		for (volatile unsigned long count = 0;; count++)
			;
	} else if (strcmp(mode, "first-thread-gone") == 0) {
		first_thread_ends(stay);
	} else if (strcmp(mode, "first-thread-gone-7") == 0) {
		first_thread_ends(end_with_7);
	} else if (strcmp(mode, "vfork") == 0) {
		/* The parent of a vfork sleeps where only SIGKILL wakes it. */
		if (vfork() == 0) {
			ready();
			for (;;)
				pause();
		}
	} else if (strcmp(mode, "no-exit-group") == 0) {
		forbid_exit_group();
		ready();
		for (;;)
			pause();
	}
	return 97;
}
