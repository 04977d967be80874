#!/bin/sh
# laoka's probe: reads what a host is and prints it as marked sections (the form is told in laoka/host/sections.py).
# It only reads. POSIX sh; every command has a deadline; one nvidia-smi at most, and none when one already hangs.
# As a plain user it reads less, and the sections that failed say so. Give it to `sh -s` on standard input, or run it.

clock() { # centiseconds since boot, without starting a program
    read -r up_now up_rest </proc/uptime
    NOW=${up_now%.*}${up_now#*.}
    while [ "$NOW" != "${NOW#0}" ] && [ -n "${NOW#0}" ]; do NOW=${NOW#0}; done
}

# tell: print the sections that are waiting, in order. Each was one word of name, filter, status, milliseconds and file; what a
# command said lies in that file and in FILE.err. One awk for many: starting programs is most of what this probe costs.
tell() {
    [ -n "$waiting" ] || return
    # shellcheck disable=SC2086 # five words a section
    awk '
    function say(line) { print "|" line }
    function plain(file, line, n) {
        while ((getline line < file) > 0) { n += length(line) + 1; if (n > 1500000) break; say(line) }
    }
    # The lines of a kernel log that say something about cards, links, windows and the boot; floods are counted, not copied.
    function kernel(file, line, i, corrected, mismatch, kept, ring, tail) {
        while ((getline line < file) > 0) {
            if (line ~ /severity=Correct|Correctable error|Corrected error/ && line !~ /Uncorrect/) {
                if (++corrected <= 20) say(line); else ring[corrected % 20] = line
            } else if (line ~ /API mismatch|has the version|same version\.$|make sure that this kernel module/) {
                if (++mismatch <= 40) say(line)
            } else if (line ~ /NVRM|[Nn]vidia|nouveau|vfio|pci[_ ]|pcieport|AER:|PCIe|BAR [0-9]|bridge window|PNP0A|DMAR|IOMMU/ ||
                line ~ /Linux version|Command line|DMI:|Secure boot|[Ll]ockdown|[Hh]ypervisor|Machine check|Hardware Error|EDAC/ ||
                line ~ /Out of memory|oom-kill|blocked for more than|soft lockup|hard LOCKUP|kernel BUG|Oops|I\/O error|thermal/) {
                if (++kept <= 5000) say(line); else tail[kept % 1000] = line
            }
        }
        for (i = corrected - 19; i <= corrected; i++) if (i > 20) say(ring[i % 20])
        for (i = kept - 999; i <= kept; i++) if (i > 5000) say(tail[i % 1000])
        if (corrected) say("# corrected AER reports: " corrected)
        if (mismatch) say("# lines about an API mismatch: " mismatch)
    }
    function cpu(file, line, n, seen) {
        while ((getline line < file) > 0) {
            if (line ~ /^processor/) n++
            else if (line ~ /^(model name|physical id|cpu cores|siblings|flags)/ && !seen[line]++) say(line)
        }
        say("threads: " n + 0)
    }
    # pid, state, parent, resident pages, start in ticks since boot, name (which may hold blanks and brackets)
    function processes(file, line, a, b, f, pid) {
        while ((getline line < file) > 0) {
            a = index(line, "("); for (b = length(line); b > 0; b--) if (substr(line, b, 1) == ")") break
            split(line, pid, " "); split(substr(line, b + 2), f, " ")
            say(pid[1] " " f[1] " " f[2] " " f[22] " " f[20] " " substr(line, a + 1, b - a - 1))
        }
    }
    function errors(file, line, n) {
        while ((getline line < file) > 0) { n += length(line) + 2; if (n >= 3000) break; print "!" line }
    }
    BEGIN {
        for (i = 1; i < ARGC; i += 5) {
            filter = ARGV[i + 1]; file = ARGV[i + 4]
            print "@section " ARGV[i]
            if (filter == "kernel") kernel(file); else if (filter == "cpu") cpu(file)
            else if (filter == "processes") processes(file); else plain(file)
            errors(file ".err")
            print "@end " ARGV[i] " rc=" ARGV[i + 2] " ms=" ARGV[i + 3]
        }
    }' $waiting
    waiting=
}

# bounded DEADLINE_S COMMAND...: run it, end it at its deadline. Busybox's own timeout leaves a watcher that holds our pipes
# open for a second after each command, so with it the watching is done here.
bounded() {
    if [ "$busybox" = no ]; then
        timeout -k 1 "$@"
        return
    fi
    seconds=$1
    shift
    "$@" &
    child=$!
    (
        exec >/dev/null 2>&1
        sleep "$seconds"
        kill -TERM $child
        sleep 1
        kill -KILL $child
    ) &
    watcher=$!
    wait $child
    ended=$?
    kill $watcher 2>/dev/null
    return $ended
}

# sec NAME DEADLINE_S COMMAND...: run it; `tell` prints its section. $filter names what picks its lines, and a status up to
# $lenient is one of success.
sec() {
    name=$1 limit=$2
    shift 2
    clock
    begun=$NOW
    left=$(((deadline - NOW) / 100))
    if [ "$left" -lt 1 ]; then
        echo "@skip $name the probe's own time was used up"
        return
    fi
    [ "$limit" -gt "$left" ] && limit=$left
    if ! command -v "$1" >/dev/null 2>&1; then
        echo "@skip $name $1 is not installed"
        return
    fi
    bounded "$limit" "$@" >"$tmp/$name" 2>"$tmp/$name.err"
    status=$?
    [ "$status" -le "$lenient" ] && status=0
    clock
    waiting="$waiting $name $filter $status $(((NOW - begun) * 10)) $tmp/$name"
}

# own NAME FILE: a small file of the kernel's that can't hang, as it is.
own() {
    if [ -r "$2" ]; then waiting="$waiting $1 $filter 0 0 $2"; else sec "$1" 2 cat "$2"; fi
}

# files NAME PATTERN FILE...: the lines that match, each with the name of its file.
files() {
    name=$1 pattern=$2
    shift 2
    set +f
    # shellcheck disable=SC2086 # the names are patterns on purpose
    set -- $*
    set -f
    lenient=2 # grep: nothing matches, or a file is not there
    sec "$name" 3 grep -HsE "$pattern" "$@"
    lenient=0
}

smi_begin() {
    smi=none
    command -v nvidia-smi >/dev/null 2>&1 || { smi_skip="nvidia-smi is not installed"; return; }
    if grep -qs '(nvidia-smi) D ' "$tmp/processes"; then
        smi_skip="an nvidia-smi already hangs in an uninterruptible read (D state): no second one is started"
        return
    fi
    smi=started
    clock
    smi_begun=$NOW
    # In the background: a wedged driver holds it for ever.
    (
        exec >"$tmp/nvidia-smi-xml" 2>"$tmp/nvidia-smi-xml.err"
        timeout -k 1 7 nvidia-smi -q -x
        echo $? >"$tmp/rc"
    ) >/dev/null 2>&1 &
}

smi_end() {
    if [ "$smi" = none ]; then
        echo "@skip nvidia-smi-xml $smi_skip"
        return
    fi
    clock
    while [ ! -s "$tmp/rc" ] && [ "$NOW" -lt "$deadline" ]; do
        sleep 0.1 2>/dev/null || sleep 1
        clock
    done
    status=124
    [ -s "$tmp/rc" ] && read -r status <"$tmp/rc"
    waiting="$waiting nvidia-smi-xml plain $status $(((NOW - smi_begun) * 10)) $tmp/nvidia-smi-xml"
}

main() {
    LC_ALL=C LANG=C PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    export LC_ALL LANG PATH
    set -f
    unset IFS
    clock
    started=$NOW
    deadline=$((NOW + 880))
    filter=plain lenient=0 waiting='' tmp=''
    echo "@laoka-probe 1"
    if ! command -v timeout >/dev/null 2>&1 || ! command -v awk >/dev/null 2>&1; then
        echo "@skip everything timeout or awk is not installed"
        echo "@done ms=0"
        return
    fi

    # What commands say goes through files: a wedged driver can hold a command for ever, and it must not hold us nor our output.
    for folder in /dev/shm /run /tmp /var/tmp; do
        tmp=$(mktemp -d "$folder/laoka-probe.XXXXXX" 2>/dev/null) && break
    done
    if [ -z "$tmp" ]; then
        echo "@skip everything no folder of /dev/shm, /run, /tmp and /var/tmp can be written"
        echo "@done ms=0"
        return
    fi
    trap 'rm -rf "$tmp"' 0
    trap 'exit 1' 1 2 13 15

    busybox=no
    case $(timeout --help 2>&1) in *BusyBox*) busybox=yes ;; esac

    sec probe 2 sh -c 'echo "uid=$(id -u)"; echo "epoch_s=$(date +%s)"; echo "uptime_s=$(cut -d" " -f1 /proc/uptime)"
        test -e /srv/laoka-sandbox/simulated && echo simulated=1; true'

    # PCI first: nothing that touches the driver comes before it, and links are still as idle as they were.
    dev=/sys/bus/pci/devices
    set +f
    for file in vendor device class subsystem_vendor subsystem_device revision resource enable numa_node boot_vga \
        current_link_speed current_link_width max_link_speed max_link_width power_state link/l1_aspm link/l0s_aspm \
        aer_dev_correctable aer_dev_nonfatal aer_dev_fatal reset_method; do
        wanted="$wanted $dev/*/$file"
    done
    set -f
    files pci-attributes '' "$wanted"
    sec pci-links 2 sh -c 'ls -l "$0"/; for d in "$0"/*; do test -e "$d/driver" && printf "%s\n" "$d/driver"; done | xargs -r ls -ld; true' $dev
    tell # from here on a command may meet hardware that hangs: what was read before it is out
    sec pci-config 2 sh -c 'for d in "$0"/*; do read -r v <"$d/vendor" || continue; [ "$v" = 0x10de ] || continue
        echo "${d##*/}" $(od -An -v -tx1 -N256 "$d/config"); done; true' $dev
    if [ -e /srv/laoka-sandbox/simulated ]; then
        echo "@skip iomem the memory map is that of the machine around the sandbox, not of the simulated board"
    else
        own iomem /proc/iomem
    fi

    filter=processes
    sec processes 2 sh -c 'cat /proc/[0-9]*/stat 2>/dev/null; true'
    smi_begin
    tell

    filter=kernel
    if [ -e /srv/laoka-sandbox/simulated ]; then # a sandbox host has no kernel log of its own, but records in that form
        # (what is no plain character is \xHH in a record; a line feed begins a line of its own, as dmesg shows it)
        sec dmesg 2 awk '/^[0-9]+,/ { split($0, head, ","); n = split(substr($0, index($0, ";") + 1), lines, "\\\\x0a")
            for (i = 1; i <= n; i++) if (lines[i] != "") printf "[%.6f] %s\n", head[3] / 1e6, lines[i] }' /srv/laoka-sandbox/kmsg
    else
        sec dmesg 2 dmesg
    fi
    sec journal-kernel 3 journalctl _TRANSPORT=kernel -n 8000 -o short-unix --no-pager -q
    filter=plain
    sec boots 2 journalctl --list-boots --no-pager -q
    sec journal-previous-boot 2 journalctl -b -1 -n 40 -o short-unix --no-pager -q \
        -t kernel -t systemd -t systemd-shutdown -t systemd-journald -t systemd-logind
    tell
    sec lspci 2 lspci -Dnnvvv -d 10de:

    files dmi '' /sys/class/dmi/id/bios_vendor /sys/class/dmi/id/bios_version /sys/class/dmi/id/bios_date \
        /sys/class/dmi/id/board_vendor /sys/class/dmi/id/board_name /sys/class/dmi/id/board_version \
        /sys/class/dmi/id/sys_vendor /sys/class/dmi/id/product_name /sys/class/dmi/id/chassis_type
    sec dmidecode 2 dmidecode -t 4,9,16,17,39
    sec efi 2 sh -c 'test -d /sys/firmware/efi && echo efi=1 || echo efi=0
        od -An -tx1 -j4 -N1 /sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c 2>/dev/null | sed "s/^ */secure_boot=/"
        ls -l /sys/firmware/efi/efivars/ 2>/dev/null | grep " Setup-" ; true'
    sec secure-boot 2 mokutil --sb-state
    sec virt 2 sh -c 'if command -v systemd-detect-virt >/dev/null; then
            systemd-detect-virt --vm | sed "s/^/vm=/"; systemd-detect-virt --container | sed "s/^/container=/"; fi
        test -e /.dockerenv && echo dockerenv=1; test -e /run/.containerenv && echo containerenv=1
        test -e /proc/sys/fs/binfmt_misc/WSLInterop && echo wsl_interop=1; test -e /dev/dxg && echo dxg=1
        test -e /run/systemd/container && sed "s/^/container=/" /run/systemd/container; true'

    sec uname 2 uname -a
    sec os-release 2 sh -c 'cat /etc/os-release || cat /usr/lib/os-release'
    own cmdline /proc/cmdline
    filter=cpu
    own cpuinfo /proc/cpuinfo
    filter=plain
    own meminfo /proc/meminfo
    files numa '' '/sys/devices/system/node/node[0-9]*/cpulist'
    sec glibc 2 getconf GNU_LIBC_VERSION
    sec python 2 sh -c 'for p in /usr/bin/python3 /usr/bin/python3.1? /usr/local/bin/python3.1?; do
        test -x "$p" && echo "$p $("$p" --version 2>&1)"; done; true'
    sec compiler 2 gcc --version

    sec boot-files 2 sh -c 'stat -c "%Y %s %n" /boot/vmlinuz-* /boot/initrd.img-* /boot/initramfs-*.img /etc/modprobe.d/* 2>/dev/null; true'
    sec kernels 2 sh -c 'for d in /lib/modules/*/; do d=${d%/}; test -e "$d/modules.dep" || test -e "$d/kernel" && echo "${d##*/}"; done; true'
    sec headers 2 sh -c 'for d in /lib/modules/*/build; do test -e "$d/Makefile" && d=${d%/build} && echo "${d##*/}"; done; true'
    # Debian's own packages call the file nvidia-current; `modprobe nvidia` finds it by a rule of theirs, modinfo does not.
    sec modinfo 3 sh -c 'for d in /lib/modules/*/; do test -d "$d" || continue; k=$(basename "$d") m=nvidia; echo "[$k]"
        modinfo -k "$k" nvidia-current >/dev/null 2>&1 && m=nvidia-current
        modinfo -k "$k" $m 2>&1 | grep -E "^(filename|version|license|signer|vermagic):|not found|ERROR"; done; true'
    own modules /proc/modules
    tell
    sec dkms-status 8 dkms status
    sec dkms-failures 2 sh -c 'test -e /var/log/apt/term.log || exit 0; grep -a "Bad return status for module build\|^Consult /var/lib/dkms" /var/log/apt/term.log | tail -n 8'
    files modprobe '^[^#]*(nouveau|nvidia|vfio)' '/etc/modprobe.d/*' '/lib/modprobe.d/*' '/usr/lib/modprobe.d/*' '/etc/modules-load.d/*' /etc/initramfs-tools/modules
    files grub '^[^#]*GRUB_' /etc/default/grub '/etc/default/grub.d/*'
    sec grubenv 2 sh -c 'cat /boot/grub/grubenv 2>/dev/null || cat /boot/grub2/grubenv'
    sec grub-menu 2 sh -c 'for f in /boot/grub/grub.cfg /boot/grub2/grub.cfg; do test -r "$f" && exec grep -E "^[[:space:]]*(menuentry|submenu) |set default=" "$f"; done; echo "no grub.cfg that may be read" >&2; exit 1'
    tell
    sec nvidia-proc 2 cat /proc/driver/nvidia/version
    # The loader knows them in other places too (containers mount them where they like); Debian's own packages have the version
    # only at the end of a chain of links.
    sec nvidia-libraries 2 sh -c 'PATH=$PATH:/sbin:/usr/sbin
        set -- /usr/lib/x86_64-linux-gnu/libnvidia-ml.so* /usr/lib/x86_64-linux-gnu/libcuda.so* /usr/lib64/libnvidia-ml.so* /usr/lib64/libcuda.so* \
            /usr/local/nvidia/lib64/libnvidia-ml.so* /usr/local/nvidia/lib64/libcuda.so* \
            $(ldconfig -p 2>/dev/null | sed -n "s/.*=> \(.*\/lib\(nvidia-ml\|cuda\)\.so\.[0-9].*\)/\1/p")
        ls -l "$@" 2>/dev/null; readlink -f "$@" 2>/dev/null; true'

    sec packages 3 dpkg-query -W -f '${Package} ${Version} ${db:Status-Abbrev} ${Architecture}\n' \
        '*nvidia*' 'libcuda*' 'cuda*' 'libcudnn*' 'linux-image*' 'linux-headers*' 'linux-modules*' 'linux-generic*' 'xserver-xorg-video-nouveau' \
        dkms unattended-upgrades rsyslog pciutils mokutil gcc 'python3.1*' docker.io docker-ce
    sec rpms 3 rpm -qa --qf '%{NAME} %{VERSION}-%{RELEASE} %{ARCH}\n' '*nvidia*' 'kernel*' 'cuda*' 'dkms*'
    sec holds 3 sh -c 'dpkg --get-selections | grep "[[:space:]]hold\$"; test $? -le 1'
    files apt-preferences '' /etc/apt/preferences '/etc/apt/preferences.d/*'
    files apt-sources '(nvidia|cuda)' '/etc/apt/sources.list' '/etc/apt/sources.list.d/*'
    sec apt-config 3 sh -c 'apt-config dump | grep -E "^(Unattended-Upgrade|APT::Periodic)"; true'
    # What is installed is asked for by name: a fixed list can't have every package that an upgrade could move.
    installed=$(awk '$3 ~ /^.i/ && $1 ~ /nvidia|^libcuda|^linux-(image|headers|generic)/ { print $1 }' "$tmp/packages" 2>/dev/null)
    # apt keeps what it made of its lists, and of these with what is installed, and makes anew what is older than its source: 36 MB
    # and 0.3 s each. This only reads, so it is told to write neither; the lists' half serves while they are unchanged.
    no_cache=
    older_than() { [ ! -e "$1" ] || [ -n "$(f=$1; shift; bounded 2 find "$@" -maxdepth 1 -newer "$f" 2>/dev/null)" ]; }
    set -- /var/lib/apt/lists /etc/apt/sources.list /etc/apt/sources.list.d
    if older_than /var/cache/apt/pkgcache.bin /var/lib/dpkg/status "$@"; then
        no_cache='-o Dir::Cache::pkgcache='
        older_than /var/cache/apt/srcpkgcache.bin "$@" && no_cache="$no_cache -o Dir::Cache::srcpkgcache="
    fi
    # shellcheck disable=SC2086 # one word an option, one a name
    sec apt-policy 3 apt-cache $no_cache policy nvidia-driver-580-server nvidia-driver-580 nvidia-dkms-580-server nvidia-headless-580-server \
        nvidia-driver nvidia-driver-pinning-580 cuda-drivers cuda-drivers-580 cuda linux-image-generic linux-image-amd64 $installed

    tell
    sec services 2 systemctl show -p Id,LoadState,ActiveState,SubState,UnitFileState,NRestarts \
        nvidia-persistenced.service unattended-upgrades.service apt-daily-upgrade.timer apt-daily.timer qwen-serve.service \
        rsyslog.service nvidia-fabricmanager.service gdm.service lightdm.service docker.service qwen-watchdog.service \
        laoka-power.service qwen-guard.service
    sec failed-units 2 systemctl list-units --failed --no-legend --plain --no-pager
    # What laoka has put here: links, stamps, flags, the watchdog's state, deploys; and hashes of what units are made of.
    if [ -e /var/lib/laoka ] || [ -e /opt/laoka ]; then
        sec laoka 3 sh -c 'exec 2>/dev/null; s=/var/lib/laoka/stamps; d=/var/lib/laoka/deploys
            grep -Hs "" /opt/laoka/engines/current/laoka-complete /opt/laoka/engines/current/laoka-engine.json /etc/laoka/speculative.json \
                /var/lib/laoka/speculative.json /etc/qwen-serve/vllm.yaml /etc/qwen-serve/*/vllm.yaml /run/qwen-serve/state.json \
                /run/laoka/watchdog.json /var/lib/laoka/watchdog/alert-test.json $s/*.config $d/lock
            test -e $d/ledger && tail -n 20 $d/ledger | sed "s|^|$d/ledger:|"
            test -s $d/lock && { read -r line; read -r boot pid rest; } <$d/lock && read -r boot </proc/sys/kernel/random/boot_id &&
                echo "@owner $boot $(date +%s) $(sed "s/.*) //" /proc/$pid/stat | cut -d " " -f 20)"
            set -- $(sed -s 1d $s/*.config | sort -u)
            for p in /opt/laoka/agent/current /opt/laoka/engines/current /srv/laoka/models/current /srv/laoka/models/drafter "$@"; do
                test -L "$p" && echo "@link $p $(readlink -f "$p")"; done
            test $# = 0 || sha256sum "$@" | sed "s|^|@hash |"
            true'
    else
        echo "@skip laoka nothing of it is installed here"
    fi
    tell # a dead network folder holds df
    sec disks 3 df -kP
    sec inodes 3 df -iP
    sec log-size 2 du -sk /var/log
    sec journal-size 2 journalctl --disk-usage
    files journald '^[^#;]' /etc/systemd/journald.conf '/etc/systemd/journald.conf.d/*' '/run/systemd/journald.conf.d/*'
    files rsyslog-filters '(AER|RxErr|BadTLP|PCIe Bus Error)' /etc/rsyslog.conf '/etc/rsyslog.d/*'
    tell
    sec installs 3 sh -c 'exec 2>/dev/null; ls -d /usr/local/cuda* /opt/cuda* /etc/alternatives/cuda; readlink /usr/local/cuda
        ls -d /usr/local/lib/python3*/*-packages/*.dist-info /usr/lib/python3/dist-packages/*.dist-info /opt/*/lib/python3*/site-packages/*.dist-info \
            /opt/*/*/lib/python3*/site-packages/*.dist-info /opt/*/*/*/lib/python3*/site-packages/*.dist-info /srv/*/lib/python3*/site-packages/*.dist-info \
            /root/*/lib/python3*/site-packages/*.dist-info /root/.local/lib/python3*/site-packages/*.dist-info /home/*/*/lib/python3*/site-packages/*.dist-info \
            /home/*/*/*/lib/python3*/site-packages/*.dist-info /home/*/.local/lib/python3*/site-packages/*.dist-info |
            grep -E "/(torch|vllm|1cat_vllm|revolta[_a-z]*|flash_attn[_a-z0-9]*|triton|nvidia_cuda_runtime[_a-z0-9]*)-[^/]*$"; true'
    files hwmon '' '/sys/class/hwmon/hwmon*/name' '/sys/class/hwmon/hwmon*/temp*_input' '/sys/class/hwmon/hwmon*/fan*_input' '/sys/class/hwmon/hwmon*/pwm[0-9]'
    tell
    smi_end
    tell
    clock
    echo "@done ms=$(((NOW - started) * 10))"
}

main </dev/null
