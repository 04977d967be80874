// SPDX-License-Identifier: GPL-2.0
/*
 * fakepci: a PCI host bridge in software, with root ports and simulated Tesla V100 cards, for a throw-away guest kernel.
 *
 * The kernel's own PCI code scans it, sizes BARs and bridge windows, places them or finds no room, and shows the result in
 * sysfs, /proc/iomem and dmesg: that part is real. There is no memory behind the BARs (reads give what the machine gives for
 * unclaimed addresses) and no interrupt, so no driver may be bound to a card, and NVIDIA's own can't run.
 *
 * What is laid out, with the sources of the values (pci.ids; `lspci -vvv`, lshw and kernel logs of real hosts):
 *   0000:80        host bridge, as the second root of an X99 or X10 board; windows named as ACPI's are in /proc/iomem
 *   0000:80:0N.0   root port of card N (8086:6f08, Broadwell-EP), Gen3 x16
 *   0000:8x:00.0   10de:1db6 (V100 PCIe 32 GB) or 10de:1db4 (16 GB): class 0302, BAR0 16 MiB, BAR1 32 or 16 GiB and
 *                  BAR3 32 MiB (both 64-bit prefetchable), PCIe capability Gen3 x16, AER
 *
 * Learned on real kernels (6.1, 5.10):
 *   - The low window has to be a free piece of the real root bridge's own: /proc/iomem then shows it below `PCI Bus 0000:00`.
 *     The window above 4 GiB stands alone, as on a board. QEMU's TCG has 40 address bits, so it lies at 512 GiB, not at 56 TiB.
 *   - The kernel complains once that it can't insert our bus range: the real domain 0 claims all 256 buses. No harm.
 *   - A card that fell off the bus answers all ones and swallows writes; the kernel goes on showing what it read at the scan.
 *     The port above it shows a link that is down. remove + rescan finds nothing until the card answers again.
 *   - pcieport asks for interrupts that are not there and goes without its services; AER counters are in sysfs all the same.
 */
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/slab.h>
#include <asm/pci.h>

#define MAX_CARDS 8
#define BUSES_PER_ROOT 0x20
#define NVIDIA 0x10de
#define V100_16GB 0x1db4
#define V100_32GB 0x1db6
#define ROOT_PORT 0x6f088086		/* device and vendor id, as one dword */
#define CLASS_3D 0x030200
#define CLASS_BRIDGE 0x060400
#define REVISION_A1 0xa1
#define CAP_PCIE 0x78			/* where a V100 has it */
#define LOW_WINDOW_BASE 0xc0000000ULL
#define LOW_WINDOW_SIZE (256ULL << 20)
#define HIGH_WINDOW_BASE 0x8000000000ULL
#define MEM64_PREF (PCI_BASE_ADDRESS_MEM_TYPE_64 | PCI_BASE_ADDRESS_MEM_PREFETCH)

static uint cards = 2;
module_param(cards, uint, 0444);
MODULE_PARM_DESC(cards, "number of cards, 0 to 8");

static uint device = V100_32GB;
module_param(device, uint, 0444);
MODULE_PARM_DESC(device, "PCI device id: 0x1db6 (32 GiB BAR1) or 0x1db4 (16 GiB BAR1)");

static ulong window_mib = 256 << 10;
module_param(window_mib, ulong, 0444);
MODULE_PARM_DESC(window_mib, "size of the window above 4 GiB, MiB; 0: none (Above 4G Decoding is off)");

static uint domain;
module_param(domain, uint, 0444);
MODULE_PARM_DESC(domain, "PCI domain of the host bridge");

static uint bus = 0x80;
module_param(bus, uint, 0444);
MODULE_PARM_DESC(bus, "number of the root bus");

static uint speed[MAX_CARDS] = { [0 ... MAX_CARDS - 1] = 3 };
module_param_array(speed, uint, NULL, 0644);
MODULE_PARM_DESC(speed, "generation at which each card's link runs now (1: 2.5, 2: 5, 3: 8 GT/s)");

static uint width[MAX_CARDS] = { [0 ... MAX_CARDS - 1] = 16 };
module_param_array(width, uint, NULL, 0644);
MODULE_PARM_DESC(width, "lanes at which each card's link runs now");

static uint slot_width[MAX_CARDS] = { [0 ... MAX_CARDS - 1] = 16 };
module_param_array(slot_width, uint, NULL, 0444);
MODULE_PARM_DESC(slot_width, "lanes that the port above each card can do");

static uint lost;
module_param(lost, uint, 0644);
MODULE_PARM_DESC(lost, "bit mask: cards that fell off the bus (all reads give ones; sysfs still shows them)");

static uint heals;
module_param(heals, uint, 0644);
MODULE_PARM_DESC(heals, "bit mask: lost cards that answer again after a secondary bus reset by the port above them");

/* Configuration space of one function: what reads give, and which bits a write may change. */
struct function {
	u8 bytes[PCI_CFG_SPACE_EXP_SIZE];
	u8 writable[PCI_CFG_SPACE_EXP_SIZE];
};

static struct function *ports[MAX_CARDS], *gpus[MAX_CARDS];
static struct pci_bus *root;
static struct pci_sysdata sysdata;
static char window_name[] = "PCI Bus 0000:00";
static struct resource low_window = { .flags = IORESOURCE_MEM };
static struct resource high_window = { .flags = IORESOURCE_MEM | IORESOURCE_MEM_64 | IORESOURCE_PREFETCH };
static struct resource bus_range = { .name = "fakepci buses", .flags = IORESOURCE_BUS };
static unsigned int removed_mask;

static void put(u8 *bytes, int where, int size, u64 value)
{
	for (; size > 0; size--, value >>= 8)
		bytes[where++] = value;
}

static u32 get(const u8 *bytes, int where, int size)
{
	u32 value = 0;

	while (size-- > 0)
		value = value << 8 | bytes[where + size];
	return value;
}

static bool is_set(uint mask, uint index)
{
	return mask >> index & 1;
}

/* A PCIe capability (the only one of the list) and, above it, the AER capability with all counters at rest. */
static void add_pcie(struct function *f, bool is_port, uint index)
{
	u32 lanes = is_port ? slot_width[index] : 16;
	u32 type = is_port ? PCI_EXP_TYPE_ROOT_PORT : PCI_EXP_TYPE_ENDPOINT;
	u32 link = 3 | lanes << 4 | (index + 1) << 24 | (is_port ? PCI_EXP_LNKCAP_DLLLARC : 0);

	f->bytes[PCI_STATUS] |= PCI_STATUS_CAP_LIST;
	f->bytes[PCI_CAPABILITY_LIST] = CAP_PCIE;
	put(f->bytes, CAP_PCIE, 4, PCI_CAP_ID_EXP | (2 | type << 4 | (is_port ? PCI_EXP_FLAGS_SLOT : 0)) << 16);
	put(f->bytes, CAP_PCIE + PCI_EXP_DEVCAP, 4, PCI_EXP_DEVCAP_RBER | 1);
	put(f->writable, CAP_PCIE + PCI_EXP_DEVCTL, 2, 0xffff);
	put(f->bytes, CAP_PCIE + PCI_EXP_LNKCAP, 4, link);
	put(f->writable, CAP_PCIE + PCI_EXP_LNKCTL, 2, 0xffff);
	put(f->bytes, CAP_PCIE + PCI_EXP_LNKCAP2, 4, PCI_EXP_LNKCAP2_SLS_2_5GB | PCI_EXP_LNKCAP2_SLS_5_0GB | PCI_EXP_LNKCAP2_SLS_8_0GB);
	put(f->bytes, CAP_PCIE + PCI_EXP_LNKCTL2, 2, 3);
	put(f->writable, CAP_PCIE + PCI_EXP_LNKCTL2, 2, 0xffff);
	if (is_port) {
		put(f->bytes, CAP_PCIE + PCI_EXP_SLTCAP, 4, (index + 1) << 19);
		put(f->bytes, CAP_PCIE + PCI_EXP_SLTSTA, 2, PCI_EXP_SLTSTA_PDS);
	}
	put(f->bytes, PCI_CFG_SPACE_SIZE, 4, PCI_EXT_CAP_ID_ERR | 1 << 16);
	put(f->writable, PCI_CFG_SPACE_SIZE + PCI_ERR_UNCOR_MASK, 4, ~0U);
	put(f->writable, PCI_CFG_SPACE_SIZE + PCI_ERR_UNCOR_SEVER, 4, ~0U);
	put(f->writable, PCI_CFG_SPACE_SIZE + PCI_ERR_COR_MASK, 4, ~0U);
}

static struct function *new_port(uint index)
{
	struct function *f = kzalloc(sizeof(*f), GFP_KERNEL);

	if (!f)
		return NULL;
	put(f->bytes, PCI_VENDOR_ID, 4, ROOT_PORT);
	put(f->bytes, PCI_CLASS_REVISION, 4, CLASS_BRIDGE << 8 | 1);
	f->bytes[PCI_HEADER_TYPE] = PCI_HEADER_TYPE_BRIDGE;
	put(f->writable, PCI_COMMAND, 2, PCI_COMMAND_MEMORY | PCI_COMMAND_MASTER | PCI_COMMAND_PARITY | PCI_COMMAND_SERR);
	put(f->writable, PCI_PRIMARY_BUS, 3, 0xffffff);
	put(f->bytes, PCI_IO_BASE, 2, 0x00f0);			/* base above limit: no I/O window */
	put(f->writable, PCI_MEMORY_BASE, 4, 0xfff0fff0);
	put(f->bytes, PCI_PREF_MEMORY_BASE, 4, 0x00010001);	/* decodes 64 bits */
	put(f->writable, PCI_PREF_MEMORY_BASE, 4, 0xfff0fff0);
	put(f->writable, PCI_PREF_BASE_UPPER32, 8, ~0ULL);
	put(f->writable, PCI_BRIDGE_CONTROL, 2, 0xffff);
	add_pcie(f, true, index);
	return f;
}

static void add_bar64(struct function *f, int where, u64 size)
{
	put(f->bytes, where, 4, MEM64_PREF);
	put(f->writable, where, 8, ~(size - 1));
}

static struct function *new_gpu(uint index)
{
	struct function *f = kzalloc(sizeof(*f), GFP_KERNEL);

	if (!f)
		return NULL;
	put(f->bytes, PCI_VENDOR_ID, 4, device << 16 | NVIDIA);
	put(f->bytes, PCI_CLASS_REVISION, 4, CLASS_3D << 8 | REVISION_A1);
	put(f->bytes, PCI_SUBSYSTEM_VENDOR_ID, 4, (device == V100_32GB ? 0x124a : 0x1214) << 16 | NVIDIA);
	put(f->writable, PCI_COMMAND, 2, PCI_COMMAND_MEMORY | PCI_COMMAND_MASTER | PCI_COMMAND_PARITY | PCI_COMMAND_SERR);
	put(f->writable, PCI_BASE_ADDRESS_0, 4, ~((16U << 20) - 1));
	add_bar64(f, PCI_BASE_ADDRESS_1, device == V100_32GB ? 32ULL << 30 : 16ULL << 30);
	add_bar64(f, PCI_BASE_ADDRESS_3, 32ULL << 20);
	add_pcie(f, false, index);
	return f;
}

/* Which function answers at this place; NULL when none does. `index` is the card's, also for the port above it. */
static struct function *find(struct pci_bus *where, unsigned int devfn, uint *index, bool *is_gpu)
{
	uint i;

	if (!where->self && where->number == bus) {
		i = PCI_SLOT(devfn) - 1;
		if (PCI_FUNC(devfn) || i >= cards)
			return NULL;
		*index = i;
		*is_gpu = false;
		return ports[i];
	}
	for (i = 0; i < cards; i++) {
		if (ports[i]->bytes[PCI_SECONDARY_BUS] != where->number)
			continue;
		if (devfn || is_set(removed_mask, i))
			return NULL;
		*index = i;
		*is_gpu = true;
		return gpus[i];
	}
	return NULL;
}

/* Link and slot status as they are now; a lost or removed card takes the link down, and a port without one shows no lanes. */
static void refresh(struct function *f, uint index, bool is_gpu)
{
	bool up = !is_set(lost | removed_mask, index);
	u16 link = speed[index] | width[index] << 4;

	if (!is_gpu)
		link = up ? link | PCI_EXP_LNKSTA_DLLLA : 1;
	put(f->bytes, CAP_PCIE + PCI_EXP_LNKSTA, 2, link);
	if (!is_gpu)
		put(f->bytes, CAP_PCIE + PCI_EXP_SLTSTA, 2, is_set(removed_mask, index) ? 0 : PCI_EXP_SLTSTA_PDS);
}

static int config_read(struct pci_bus *where, unsigned int devfn, int offset, int size, u32 *value)
{
	struct function *f;
	bool is_gpu;
	uint index;

	*value = ~0U;
	f = find(where, devfn, &index, &is_gpu);
	if (!f)
		return PCIBIOS_DEVICE_NOT_FOUND;
	if (offset + size > PCI_CFG_SPACE_EXP_SIZE)
		return PCIBIOS_BAD_REGISTER_NUMBER;
	if (is_gpu && is_set(lost, index))
		return PCIBIOS_SUCCESSFUL;
	refresh(f, index, is_gpu);
	*value = get(f->bytes, offset, size);
	return PCIBIOS_SUCCESSFUL;
}

static int config_write(struct pci_bus *where, unsigned int devfn, int offset, int size, u32 value)
{
	struct function *f;
	bool is_gpu, in_reset;
	uint index;

	f = find(where, devfn, &index, &is_gpu);
	if (!f)
		return PCIBIOS_DEVICE_NOT_FOUND;
	if (offset + size > PCI_CFG_SPACE_EXP_SIZE)
		return PCIBIOS_BAD_REGISTER_NUMBER;
	if (is_gpu && is_set(lost, index))
		return PCIBIOS_SUCCESSFUL;
	in_reset = !is_gpu && f->bytes[PCI_BRIDGE_CONTROL] & PCI_BRIDGE_CTL_BUS_RESET;
	for (; size > 0; size--, offset++, value >>= 8)
		f->bytes[offset] = (f->bytes[offset] & ~f->writable[offset]) | (value & f->writable[offset]);
	/* The end of a reset is what wakes a card. */
	if (in_reset && !(f->bytes[PCI_BRIDGE_CONTROL] & PCI_BRIDGE_CTL_BUS_RESET))
		lost &= ~(heals & 1U << index);
	return PCIBIOS_SUCCESSFUL;
}

static struct pci_ops ops = { .read = config_read, .write = config_write };

/* removed: cards that are pulled out. They leave sysfs at once; who clears a bit has to rescan the bus to find the card. */
static int set_removed(const char *text, const struct kernel_param *kp)
{
	unsigned int mask, i;
	struct pci_dev *gone;
	int error = kstrtouint(text, 0, &mask);

	if (error)
		return error;
	removed_mask = mask;
	for (i = 0; root && i < cards; i++) {
		if (!is_set(mask, i))
			continue;
		gone = pci_get_domain_bus_and_slot(domain, ports[i]->bytes[PCI_SECONDARY_BUS], 0);
		if (gone)
			pci_stop_and_remove_bus_device_locked(gone);
		pci_dev_put(gone);
	}
	return 0;
}

static const struct kernel_param_ops removed_ops = { .set = set_removed, .get = param_get_uint };
module_param_cb(removed, &removed_ops, &removed_mask, 0644);
MODULE_PARM_DESC(removed, "bit mask: cards that are not in their slot");

/* say: a line for the kernel log, of the kernel's own facility. Lines written to /dev/kmsg are the user facility's. */
static int set_say(const char *text, const struct kernel_param *kp)
{
	printk(KERN_ERR "%.*s\n", (int)strcspn(text, "\n"), text);
	return 0;
}

static const struct kernel_param_ops say_ops = { .set = set_say };
module_param_cb(say, &say_ops, NULL, 0200);
MODULE_PARM_DESC(say, "write-only: printed to the kernel log as a kernel record of level err");

static void free_functions(void)
{
	uint i;

	for (i = 0; i < MAX_CARDS; i++) {
		kfree(ports[i]);
		kfree(gpus[i]);
	}
}

static int claim_windows(void)
{
	low_window.name = high_window.name = window_name;
	low_window.start = LOW_WINDOW_BASE;
	low_window.end = LOW_WINDOW_BASE + LOW_WINDOW_SIZE - 1;
	if (insert_resource(&iomem_resource, &low_window))
		return -EBUSY;
	if (low_window.child) {		/* a real device lies there */
		remove_resource(&low_window);
		return -EBUSY;
	}
	if (!window_mib)
		return 0;
	high_window.start = HIGH_WINDOW_BASE;
	high_window.end = HIGH_WINDOW_BASE + ((u64)window_mib << 20) - 1;
	if (insert_resource(&iomem_resource, &high_window)) {
		release_resource(&low_window);
		return -EBUSY;
	}
	return 0;
}

static void release_windows(void)
{
	release_resource(&low_window);
	if (window_mib)
		release_resource(&high_window);
}

static int __init fakepci_init(void)
{
	LIST_HEAD(windows);
	struct pci_bus *child;
	int error;
	uint i;

	if (cards > MAX_CARDS || (device != V100_16GB && device != V100_32GB) || bus + BUSES_PER_ROOT > 0x100)
		return -EINVAL;
	for (i = 0; i < cards; i++) {
		ports[i] = new_port(i);
		gpus[i] = new_gpu(i);
		if (!ports[i] || !gpus[i]) {
			free_functions();
			return -ENOMEM;
		}
	}
	snprintf(window_name, sizeof(window_name), "PCI Bus %04x:%02x", domain & 0xffff, bus);
	error = claim_windows();
	if (error) {
		free_functions();
		return error;
	}
	bus_range.start = bus;
	bus_range.end = bus + BUSES_PER_ROOT - 1;
	pci_add_resource(&windows, &low_window);
	if (window_mib)
		pci_add_resource(&windows, &high_window);
	pci_add_resource(&windows, &bus_range);
	sysdata.domain = domain;
	sysdata.node = NUMA_NO_NODE;

	pci_lock_rescan_remove();
	root = pci_create_root_bus(NULL, bus, &ops, &sysdata, &windows);
	if (!root) {
		pci_unlock_rescan_remove();
		pci_free_resource_list(&windows);
		release_windows();
		free_functions();
		return -ENODEV;
	}
	pci_scan_child_bus(root);
	pci_assign_unassigned_bus_resources(root);
	list_for_each_entry(child, &root->children, node)
		pcie_bus_configure_settings(child);
	pci_bus_add_devices(root);
	pci_unlock_rescan_remove();
	return 0;
}

static void __exit fakepci_exit(void)
{
	pci_lock_rescan_remove();
	pci_stop_root_bus(root);
	pci_remove_root_bus(root);
	pci_unlock_rescan_remove();
	release_windows();
	free_functions();
}

module_init(fakepci_init);
module_exit(fakepci_exit);
MODULE_DESCRIPTION("Simulated Tesla V100 cards on a software PCI host bridge (laoka's test bed)");
MODULE_LICENSE("GPL");
