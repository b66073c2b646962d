"""Mountinfo of containers, captured from real ones; long ids and directories of the node are shortened.

The last two were put together from what field reports and NVIDIA's and Kubernetes' own sources show.
"""

# ruff: noqa: E501 - as the kernel prints it

RUNC_V1 = """\
92 52 0:40 / / rw,relatime - overlay overlay rw,lowerdir=/img/busybox,upperdir=/b/upper,workdir=/b/work,uuid=on
93 92 0:54 / /proc rw,relatime - proc proc rw
94 92 0:55 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
95 94 0:56 / /dev/pts rw,nosuid,noexec,relatime - devpts devpts rw,gid=5,mode=620,ptmxmode=666
96 94 0:57 / /dev/shm rw,nosuid,nodev,noexec,relatime - tmpfs shm rw,size=65536k
97 94 0:45 / /dev/mqueue rw,nosuid,nodev,noexec,relatime - mqueue mqueue rw
98 92 0:58 / /sys ro,nosuid,nodev,noexec,relatime - sysfs sysfs ro
99 98 0:59 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime - tmpfs tmpfs rw,mode=755
100 99 0:29 /runc/9356 /sys/fs/cgroup/cpu ro,nosuid,nodev,noexec,relatime - cgroup cgroup rw,cpu
103 99 0:32 /runc/9356 /sys/fs/cgroup/memory ro,nosuid,nodev,noexec,relatime - cgroup cgroup rw,memory
108 99 0:37 /runc/9356 /sys/fs/cgroup/systemd ro,nosuid,nodev,noexec,relatime - cgroup cgroup rw,name=systemd
62 93 0:54 /bus /proc/bus ro,relatime - proc proc rw
63 93 0:54 /fs /proc/fs ro,relatime - proc proc rw
64 93 0:54 /irq /proc/irq ro,relatime - proc proc rw
65 93 0:54 /sys /proc/sys ro,relatime - proc proc rw
66 93 0:60 / /proc/acpi ro,relatime - tmpfs tmpfs ro
67 93 0:55 /null /proc/keys rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
68 93 0:55 /null /proc/timer_list rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
69 98 0:61 / /sys/firmware ro,relatime - tmpfs tmpfs ro
"""

CRUN_V1 = """\
115 90 0:40 / / rw,relatime - overlay overlay rw,lowerdir=/img/busybox,upperdir=/b/upper,workdir=/b/work,uuid=on
116 115 0:54 / /proc rw,relatime - proc proc rw
117 115 0:55 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
118 117 0:56 / /dev/pts rw,nosuid,noexec,relatime - devpts devpts rw,gid=5,mode=620,ptmxmode=666
137 117 0:57 / /dev/shm rw,nosuid,nodev,noexec,relatime - tmpfs shm rw,size=65536k
138 117 0:45 / /dev/mqueue rw,nosuid,nodev,noexec,relatime - mqueue mqueue rw
139 115 0:58 / /sys ro,nosuid,nodev,noexec,relatime - sysfs sysfs rw
140 139 0:59 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime - tmpfs cgroup rw,size=1024k
141 140 0:37 /crun/9356 /sys/fs/cgroup/systemd ro,nosuid,nodev,noexec,relatime - cgroup cgroup rw,name=systemd
146 140 0:32 /crun/9356 /sys/fs/cgroup/memory ro,nosuid,nodev,noexec,relatime - cgroup cgroup rw,memory
150 116 0:60 / /proc/acpi ro,relatime - tmpfs tmpfs rw,size=0k
151 116 0:6 /null /proc/keys ro,relatime - devtmpfs devtmpfs rw,size=12334192k,nr_inodes=3083548,mode=755
152 116 0:6 /null /proc/timer_list ro,relatime - devtmpfs devtmpfs rw,size=12334192k,nr_inodes=3083548,mode=755
153 139 0:61 / /sys/firmware ro,relatime - tmpfs tmpfs rw,size=0k
154 116 0:54 /bus /proc/bus ro,relatime - proc proc rw
155 116 0:54 /fs /proc/fs ro,relatime - proc proc rw
156 116 0:54 /irq /proc/irq ro,relatime - proc proc rw
157 116 0:54 /sys /proc/sys ro,relatime - proc proc rw
"""

CTR = """\
92 52 0:40 / / rw,relatime - overlay overlay rw,lowerdir=/snapshots/2/fs,upperdir=/snapshots/3/fs,workdir=/snapshots/3/work
93 92 0:54 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
94 92 0:55 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
95 94 0:56 / /dev/pts rw,nosuid,noexec,relatime - devpts devpts rw,gid=5,mode=620,ptmxmode=666
96 94 0:57 / /dev/shm rw,nosuid,nodev,noexec,relatime - tmpfs shm rw,size=65536k
97 94 0:45 / /dev/mqueue rw,nosuid,nodev,noexec,relatime - mqueue mqueue rw
98 92 0:58 / /sys ro,nosuid,nodev,noexec,relatime - sysfs sysfs ro
99 92 0:59 / /run rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
62 93 0:54 /bus /proc/bus ro,nosuid,nodev,noexec,relatime - proc proc rw
63 93 0:54 /fs /proc/fs ro,nosuid,nodev,noexec,relatime - proc proc rw
64 93 0:54 /irq /proc/irq ro,nosuid,nodev,noexec,relatime - proc proc rw
65 93 0:54 /sys /proc/sys ro,nosuid,nodev,noexec,relatime - proc proc rw
66 93 0:60 / /proc/acpi ro,relatime - tmpfs tmpfs ro
67 93 0:55 /null /proc/keys rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
68 93 0:55 /null /proc/timer_list rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
69 98 0:61 / /sys/firmware ro,relatime - tmpfs tmpfs ro
"""

CRI_V1 = """\
118 75 0:62 / / rw,relatime - overlay overlay rw,lowerdir=/snapshots/4/fs,upperdir=/snapshots/6/fs,workdir=/snapshots/6/work
137 118 0:65 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
138 118 0:66 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
139 138 0:67 / /dev/pts rw,nosuid,noexec,relatime - devpts devpts rw,gid=5,mode=620,ptmxmode=666
140 138 0:54 / /dev/mqueue rw,nosuid,nodev,noexec,relatime - mqueue mqueue rw
141 118 0:59 / /sys ro,nosuid,nodev,noexec,relatime - sysfs sysfs ro
142 141 0:68 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime - tmpfs tmpfs rw,mode=755
143 142 0:29 /kubepods/burstable/pod9356/9c8e /sys/fs/cgroup/cpu ro,nosuid,nodev,noexec,relatime - cgroup cgroup rw,cpu
151 142 0:37 /kubepods/burstable/pod9356/9c8e /sys/fs/cgroup/systemd ro,nosuid,nodev,noexec,relatime - cgroup cgroup rw,name=systemd
152 118 254:0 /k/pods/9356/etc-hosts /etc/hosts rw,relatime - ext4 /dev/vda rw,discard,resv_strict,resuid=65534,resgid=65534
153 138 254:0 /k/pods/9356/containers/worker/11223344 /dev/termination-log rw,relatime - ext4 /dev/vda rw,discard,resv_strict
154 118 254:0 /sandboxes/dfd0/hostname /etc/hostname rw,relatime - ext4 /dev/vda rw,discard,resv_strict
155 118 254:0 /sandboxes/dfd0/resolv.conf /etc/resolv.conf rw,relatime - ext4 /dev/vda rw,discard,resv_strict
156 138 0:40 / /dev/shm rw,nosuid,nodev,noexec,relatime - tmpfs shm rw,size=65536k
77 137 0:65 /bus /proc/bus ro,nosuid,nodev,noexec,relatime - proc proc rw
79 137 0:65 /fs /proc/fs ro,nosuid,nodev,noexec,relatime - proc proc rw
80 137 0:65 /irq /proc/irq ro,nosuid,nodev,noexec,relatime - proc proc rw
82 137 0:65 /sys /proc/sys ro,nosuid,nodev,noexec,relatime - proc proc rw
83 137 0:69 / /proc/acpi ro,relatime - tmpfs tmpfs ro
84 137 0:66 /null /proc/keys rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
85 137 0:66 /null /proc/timer_list rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
86 141 0:72 / /sys/firmware ro,relatime - tmpfs tmpfs ro
"""

POD_V2 = """\
2310 2266 0:412 / / rw,relatime master:871 - overlay overlay rw,lowerdir=/snapshots/41/fs:/snapshots/40/fs,upperdir=/snapshots/77/fs,workdir=/snapshots/77/work
2311 2310 0:414 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
2312 2310 0:415 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755,inode64
2313 2312 0:416 / /dev/pts rw,nosuid,noexec,relatime - devpts devpts rw,gid=5,mode=620,ptmxmode=666
2314 2312 0:401 / /dev/mqueue rw,nosuid,nodev,noexec,relatime - mqueue mqueue rw
2315 2310 0:406 / /sys ro,nosuid,nodev,noexec,relatime - sysfs sysfs ro
2316 2315 0:27 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw,nsdelegate,memory_recursiveprot
2317 2310 259:1 /var/lib/kubelet/pods/9356/volumes/kubernetes.io~empty-dir/scratch /scratch rw,relatime - ext4 /dev/nvme0n1p1 rw,discard
2318 2310 0:395 / /cache rw,relatime - tmpfs tmpfs rw,size=8388608k,inode64
2319 2310 259:1 /var/lib/kubelet/pods/9356/volumes/kubernetes.io~configmap/settings /etc/settings ro,relatime - ext4 /dev/nvme0n1p1 rw,discard
2320 2310 259:1 /var/lib/kubelet/pods/9356/volume-subpaths/settings/worker/1 /etc/worker.yaml ro,relatime - ext4 /dev/nvme0n1p1 rw,discard
2321 2310 259:1 /var/lib/hibernode/signals /signals rw,relatime master:1 - ext4 /dev/nvme0n1p1 rw,discard
2322 2310 259:1 /var/lib/kubelet/pods/9356/etc-hosts /etc/hosts rw,relatime - ext4 /dev/nvme0n1p1 rw,discard
2323 2312 259:1 /var/lib/kubelet/pods/9356/containers/worker/11223344 /dev/termination-log rw,relatime - ext4 /dev/nvme0n1p1 rw,discard
2324 2310 259:1 /sandboxes/dfd0/hostname /etc/hostname rw,relatime - ext4 /dev/nvme0n1p1 rw,discard
2325 2310 259:1 /sandboxes/dfd0/resolv.conf /etc/resolv.conf rw,relatime - ext4 /dev/nvme0n1p1 rw,discard
2326 2312 0:398 / /dev/shm rw,nosuid,nodev,noexec,relatime - tmpfs shm rw,size=65536k,inode64
2327 2310 0:396 / /run/secrets/kubernetes.io/serviceaccount ro,relatime - tmpfs tmpfs rw,size=131072k,inode64
2267 2311 0:414 /bus /proc/bus ro,nosuid,nodev,noexec,relatime - proc proc rw
2268 2311 0:414 /sys /proc/sys ro,nosuid,nodev,noexec,relatime - proc proc rw
2269 2311 0:415 /null /proc/kcore rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755,inode64
2270 2315 0:418 / /sys/firmware ro,relatime - tmpfs tmpfs ro,inode64
"""
"""containerd with cgroup v2; emptyDir on disk and in memory, a config map whole and by subPath, a hostPath with
HostToContainer propagation, a service account's token."""

NVIDIA = """\
3121 3033 0:368 / / rw,relatime master:812 - overlay overlay rw,lowerdir=/l/A:/l/B,upperdir=/u/7/fs,workdir=/u/7/work
3122 3121 0:370 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
3123 3122 0:370 /bus /proc/bus ro,nosuid,nodev,noexec,relatime - proc proc rw
3124 3122 0:384 / /proc/acpi ro,relatime - tmpfs tmpfs ro
3125 3122 0:371 /null /proc/kcore rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
3130 3122 0:385 / /proc/driver/nvidia rw,nosuid,nodev,noexec,relatime - tmpfs tmpfs rw,mode=555
3131 3130 0:22 /driver/nvidia/gpus/0000:3b:00.0 /proc/driver/nvidia/gpus/0000:3b:00.0 ro,nosuid,nodev,noexec,relatime master:14 - proc proc rw
3132 3121 259:2 /usr/lib/firmware/nvidia/535.104.05/gsp_ga10x.bin /usr/lib/firmware/nvidia/535.104.05/gsp_ga10x.bin ro,nosuid,nodev,relatime master:1 - ext4 /dev/nvme0n1p2 rw
3133 3121 259:2 /usr/lib/firmware/nvidia/535.104.05/gsp_tu10x.bin /usr/lib/firmware/nvidia/535.104.05/gsp_tu10x.bin ro,nosuid,nodev,relatime master:1 - ext4 /dev/nvme0n1p2 rw
3134 3121 259:2 /usr/bin/nvidia-smi /usr/bin/nvidia-smi ro,nosuid,nodev,relatime master:1 - ext4 /dev/nvme0n1p2 rw
3135 3121 0:25 /nvidia-persistenced/socket /run/nvidia-persistenced/socket rw,nosuid,nodev,noexec,relatime master:5 - tmpfs tmpfs rw,size=13178380k,mode=755
3136 3121 0:371 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
3137 3136 0:6 /nvidia0 /dev/nvidia0 ro,nosuid,noexec,relatime master:2 - devtmpfs udev rw,mode=755
3138 3121 259:2 /usr/lib/x86_64-linux-gnu/libcuda.so.535.104.05 /usr/lib/x86_64-linux-gnu/libcuda.so.535.104.05 ro,nosuid,nodev,relatime master:1 - ext4 /dev/nvme0n1p2 rw
3139 3121 0:31 / /run/nvidia/driver rw,relatime master:40 - overlay overlay rw,lowerdir=/d/1,upperdir=/d/2,workdir=/d/3
3140 3139 0:6 / /run/nvidia/driver/dev rw,nosuid master:2 - devtmpfs udev rw,mode=755
3141 3139 0:22 / /run/nvidia/driver/proc rw,relatime master:14 - proc proc rw
3142 3121 259:2 /var/run/nvidia/drivers /run/nvidia/drivers ro,relatime - ext4 /dev/nvme0n1p2 rw
"""
"""FC-36: what NVIDIA's container toolkit and driver container mount; the last one only has a like name."""

OLD_ROOTS = """\
20 1 8:1 / / rw - ext4 /dev/sda1 rw
21 20 0:40 / / rw - overlay overlay rw,lowerdir=/l,upperdir=/u,workdir=/w
22 21 0:54 / /proc rw - proc proc rw
23 21 0:4 / /host/proc rw - proc proc rw
24 21 8:1 / /host rw - ext4 /dev/sda1 rw
"""
"""A root on another root, and the node's own /proc and / as volumes."""
